"""Alerts of a run that looks healthy but does not learn. Rules check the metrics of the last steps.

An alert begins when its sign was seen in several consecutive steps, and ends when it was absent for `CALM` steps. It is
reported once and not in every step. The thresholds should raise no alert in runs that learn.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl4llm.tracking.trend import Change, Trend

Row = Mapping[str, Any]

FIRST = 5  # steps that show how a run began
CALM = 3  # steps without the sign, after which an alert is over
# if one sample in 100 succeeds, this many groups of 8 have equal rewards by chance in 0.6 % of cases
CONSTANT_GROUPS = 64
TRUNCATED = 0.95  # of the episodes of a step; a policy that is learning to stop is well below
COLLAPSED = 0.05  # of the initial entropy; success lowers entropy too, so it counts only below this share of successes:
SUCCESS = 0.8
GROWN, NOTICEABLE, LARGE = (
    3.0,
    0.02,
    0.1,
)  # times the first value; nats per token: bf16 alone causes about 0.01
MOST = 0.5  # of the attempts in one of several environments, or of the calls of a tool
FEW_CALLS = 16  # of a step, of all tools together; fewer tell less of a policy that is learning to call
LATE = 0.02  # of the attempts of a step; rollout.max_failed_share stops a run at 0.1 by default
BOTH_WAIT = 0.25  # of a step
CLIPPED = 0.05  # of the tokens of a first update, where ratios should be 1
REFUSED = 0.05  # of the answers of a step
SMALL = 0.2  # standard deviations of an episode's reward: a small effect (Cohen 1988)
TREND = "trend"  # key of a row for how the reward changed until then
_REFUSED = re.compile("(?:.*/)?model_faults/.+/refused")
_RAISED = re.compile("((?:.*/)?tool/(.+))/raised/(.+)")


@dataclass(frozen=True, slots=True)
class Rule:
    """`sign` describes what a step shows, given the first steps, or returns None; `weight` counts towards `enough`.

    `metric` is the glossary's name of what it watches.
    """

    name: str
    metric: str
    sign: Callable[[Row, Sequence[Row]], str | None]
    why: str
    look_at: str
    enough: float = 5.0
    weight: Callable[[Row], float] = lambda row: 1.0


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert that begins or ends: `until` is its last step. It has what was seen, why it matters, and keys to check."""

    name: str
    step: int
    since: int
    until: int | None
    seen: str
    why: str
    look_at: str

    def __str__(self) -> str:
        if self.until is not None:
            return f"{self.name} is over; it lasted from step {self.since} to {self.until}."
        return f"{self.name} since step {self.since}: {self.seen}. {self.why} Check {self.look_at}."


def constant_reward(row: Row, first: Sequence[Row]) -> str | None:
    if _number(row, "groups/zero_spread") < 1.0:
        return None
    reward = row.get("reward/mean", math.nan)
    return f"all samples of every group have the same reward, {reward:.3g} on average"


def all_truncated(row: Row, first: Sequence[Row]) -> str | None:
    share = _number(row, "truncated")
    return f"{share:.0%} of the episodes reach a token limit" if share >= TRUNCATED else None


def entropy_collapse(row: Row, first: Sequence[Row]) -> str | None:
    now, begin = _entropy(row), [entropy for early in first if (entropy := _entropy(early)) is not None]
    if now is None or not begin or len(begin) < len(first) or _number(row, "accuracy") >= SUCCESS:
        return None
    start = statistics.median(begin)
    return f"{now:.3g} nats per token; it was {start:.3g} at first" if now < COLLAPSED * start else None


def growing_mismatch(row: Row, first: Sequence[Row]) -> str | None:
    now = _number(row, "mismatch/mean")
    begin = [value for early in first if (value := _number(early, "mismatch/mean", below=-1.0)) >= 0]
    if now > LARGE:
        return f"log-probs of engine and trainer differ by {now:.3g} nats per token"
    start = statistics.median(begin) if begin else math.inf
    if now <= max(NOTICEABLE, GROWN * start):
        return None
    return f"log-probs of engine and trainer differ by {now:.3g} nats per token; it was {start:.3g} at first"


def no_gradient(row: Row, first: Sequence[Row]) -> str | None:
    """Return the sign if rewards differ; if they do not, another alert reports it."""
    if "skipped" in row or constant_reward(row, first) or not ({"trajectories", "loss"} & row.keys()):
        return None
    moved = row.get("grad_norm") or row.get("critic/grad_norm")
    return None if moved else "the gradient is 0 or missing"


def timeouts(row: Row, first: Sequence[Row]) -> str | None:
    late = {
        name: count
        for name, count in row.items()
        if count and name.startswith(("failures/", "played_again/")) and name.endswith("/timeout")
    }
    attempts = _number(row, "trajectories") + _number(row, "failures")
    if not late or sum(late.values()) < LATE * attempts:
        return None
    counts = ", ".join(f"{count:.0f} {name.partition('/')[2]}" for name, count in sorted(late.items()))
    return f"of {attempts:.0f} samples timed out and were left out or retried: {counts}"


def failing_part(row: Row, first: Sequence[Row]) -> str | None:
    """Return the sign if one environment fails, though its samples may be too few for rollout.max_failed_share."""
    for name in row:
        if name.startswith("part/") and name.endswith("/failures"):
            failed, part = _number(row, name), name.removesuffix("/failures")
            attempts = failed + _number(row, f"{part}/trajectories")
            if failed and failed >= MOST * attempts:
                return f"{failed:.0f} of {attempts:.0f} samples of {part.partition('/')[2]} failed"
    return None


def broken_tool(row: Row, first: Sequence[Row]) -> str | None:
    """Return the sign if a tool raises by mistake; that fails its samples or is shown to the policy: see `env.on_error`."""
    for name, count in row.items():
        match = _RAISED.fullmatch(name)
        calls = _number(row, f"{match[1]}/calls") if match else 0.0
        if match and calls and count >= MOST * calls:
            return f"{count / calls:.0%} of the calls of tool {match[2]} raise {match[3]}"
    return None


def failing_calls(row: Row, first: Sequence[Row]) -> str | None:
    calls, errors = _number(row, "env/tool_calls"), _number(row, "env/tool_errors")
    if not calls or errors < calls:
        return None
    return f"all {calls * _number(row, 'trajectories'):.0f} tool calls return an error"


def refusals(row: Row, first: Sequence[Row]) -> str | None:
    """Return the sign if a judge refuses to read more answers than noticeable, and than in the first steps."""
    for name in row:
        if _REFUSED.fullmatch(name):
            share = row[name] / max(1.0, _number(row, "trajectories"))
            before = [early.get(name, 0.0) / max(1.0, _number(early, "trajectories")) for early in first]
            if share > REFUSED and share > 2 * statistics.fmean(before or [0.0]):
                return f"{name.split('/')[-2]} refused to read {share:.0%} of the answers"
    return None


def no_calls(row: Row, first: Sequence[Row]) -> str | None:
    """Return the sign if a policy that may call tools never does, and is not good without them."""
    if row.get("env/tool_calls") != 0.0 or _number(row, "accuracy") >= SUCCESS:
        return None
    return f"no tool was called in {_number(row, 'trajectories'):.0f} episodes"


def both_wait(row: Row, first: Sequence[Row]) -> str | None:
    """Return the sign if episodes may begin early, and the trainer and the servers wait for each other all the same."""
    waits = _number(row, "time/rollout") / max(_number(row, "time/step"), 1e-9)
    idle = _number(row, "fleet/idle")
    if "staleness" not in row or min(waits, idle) < BOTH_WAIT:
        return None
    return f"the trainer waits for episodes {waits:.0%} of a step, and servers have no request {idle:.0%} of the time"


def clipped_first(row: Row, first: Sequence[Row]) -> str | None:
    share = _number(row, "clip_fraction/first")
    return f"{share:.0%} of the tokens are clipped in the first updates of steps" if share > CLIPPED else None


def no_progress(row: Row, first: Sequence[Row]) -> str | None:
    """Return the sign if the reward stays where it began, as far as its noise can tell, and is not good yet.

    Where opponents learn too, or prompts follow the policy, a constant reward is expected.
    """
    change: Change | None = row.get(TREND)
    moves_along = any(name.startswith(("role/", "curriculum/")) or name.endswith("/weight") for name in row)
    if change is None or moves_along or _number(row, "accuracy") >= SUCCESS:
        return None
    if not change.is_noise or change.largest > SMALL * change.scale:
        return None
    begin, end, most = (f"{number:.3g}" for number in (change.begin, change.end, change.largest))
    seen = f"the reward was {begin} in the first third of {change.steps} steps and {end} in the last, and by its noise"
    seen += f" changed by at most {most}"
    if "update_ratio" in row:
        seen += f"; an update changes the weights by {row['update_ratio']:.0e} of their size"
    return seen + f"; {1 - _number(row, 'groups/zero_spread'):.0%} of the groups teach"


RULES = (
    Rule(
        "constant reward",
        "groups/zero_spread",
        constant_reward,
        "Zero-variance groups teach nothing.",
        "data.path (too hard, or solved), rewards, rollout.group_size and rollout.temperature",
        enough=CONSTANT_GROUPS,
        weight=lambda row: _number(row, "groups/count"),
    ),
    Rule(
        "everything truncated",
        "truncated",
        all_truncated,
        "A truncated episode has no answer to score, and its length is trained by accident.",
        "rollout.max_tokens, rollout.stop, and whether the model was trained with the end of turn of the chat template",
    ),
    Rule(
        "entropy collapse",
        "entropy",
        entropy_collapse,
        "A policy that always writes the same no longer explores, and this one is not good yet.",
        "training.lr, algorithm.clip_high, algorithm.kl_coef and algorithm.entropy_coef",
    ),
    Rule(
        "growing mismatch",
        "mismatch/mean",
        growing_mismatch,
        "Training on samples of another distribution biases every step.",
        "model.dtype and the engine's, its kernels and quantization, sync; mismatch.stop_above stops a run on it",
    ),
    Rule(
        "clipped first updates",
        "clip_fraction/first",
        clipped_first,
        "The clip is relative to log-probs of the engine, of older weights or other numerics, and removes the gradient.",
        "algorithm.old_logprobs=recomputed with algorithm.correction=tis, rollout.max_staleness, and the engine's dtype",
    ),
    Rule(
        "no gradient",
        "grad_norm",
        no_gradient,
        "The optimizer steps do not change the weights.",
        "algorithm (what it filters or masks), model.lora, and training.lr",
    ),
    Rule(
        "no progress",
        "update_ratio",
        no_progress,
        "Many steps more of the same will hardly help.",
        "training.lr (three to ten times as much), then the share of groups that teach and `rl4llm check --task`",
    ),
    Rule(
        "timeouts",
        "failures/CLASS",
        timeouts,
        "This is not random: the longest and hardest episodes are missing from training.",
        "the time limits of rewards, tools and env, sandbox.slots, and the load of this machine",
        enough=3.0,
    ),
    Rule(
        "broken tool",
        "tool/NAME/raised/ERROR",
        broken_tool,
        "An exception in a tool is not the model's fault; a tool raises ToolError for the model's faults.",
        "the tool's code, `rl4llm check`, env.on_error, and tool/<name>/raised in the metrics",
        enough=3.0,
    ),
    Rule(
        "failing calls",
        "env/tool_errors",
        failing_calls,
        "The policy gets no result from any tool.",
        "the tool messages of `rl4llm view`, env.tools, env.format and env.describe_tools",
        weight=lambda row: min(
            1.0, _number(row, "env/tool_calls") * _number(row, "trajectories") / FEW_CALLS
        ),
    ),
    Rule(
        "refused answers",
        "model_faults/REWARD/KIND",
        refusals,
        "A judge that refuses does not judge: these answers score 0, whatever they say.",
        "the answers with the note refused in `rl4llm view`, the judge's content filter, and on_refusal of the reward",
        enough=3.0,
    ),
    Rule(
        "no calls",
        "env/tool_calls",
        no_calls,
        "A policy that never calls a tool does not learn to: no sample shows what a call is worth.",
        "`rl4llm check --task`, the system prompt, env.format, and SFT on conversations with calls first",
    ),
    Rule(
        "failing part",
        "failures",
        failing_part,
        "The run continues without this environment, since the others have enough samples.",
        "failures/<class> of the part, its env and rewards, and env.remote",
        enough=3.0,
    ),
    Rule(
        "binding staleness",
        "fleet/idle",
        both_wait,
        "A few slow episodes hold up a step, and rollout.max_staleness lets no others begin.",
        "rollout.max_staleness, rollout.max_tokens, and how long tools and rewards take",
    ),
)


@dataclass(slots=True)
class _Sign:
    found: float = 0.0  # of what is enough
    away: int = 0
    since: int = -1  # step with the first sign
    last: int = 0  # step with the sign
    open: bool = False


@dataclass(slots=True)
class Alerts:
    """Takes the metrics of each step in order, and returns the alerts that begin or end.

    Its state comes from the rows alone: a resumed run replays its earlier rows, so it reports nothing twice.
    """

    rules: Sequence[Rule] = RULES
    _first: list[Row] = field(default_factory=list)
    _states: dict[str, _Sign] = field(default_factory=dict)
    _trend: Trend = field(default_factory=Trend)

    def take(self, step: int, row: Row) -> list[Alert]:
        """Return the alerts that begin or end in this step."""
        self._trend.take(row)
        if change := self._trend.change():
            row = {**row, TREND: change}
        alerts = [self._apply(rule, step, row) for rule in self.rules]
        if len(self._first) < FIRST:
            self._first.append(row)
        return [alert for alert in alerts if alert]

    @property
    def open(self) -> dict[str, int]:
        """Return the open alerts, and the step in which each began."""
        return {name: state.since for name, state in self._states.items() if state.open}

    def _apply(self, rule: Rule, step: int, row: Row) -> Alert | None:
        state = self._states.setdefault(rule.name, _Sign())
        seen = rule.sign(row, self._first if len(self._first) == FIRST else ())
        if seen:
            state.since = step if state.since < 0 else state.since
            state.found, state.away, state.last = state.found + rule.weight(row), 0, step
            if not state.open and state.found >= rule.enough:
                state.open = True
                return Alert(rule.name, step, state.since, None, seen, rule.why, rule.look_at)
            return None
        state.away += 1
        if state.open and state.away < CALM:
            return None
        self._states[rule.name] = _Sign()
        return Alert(rule.name, step, state.since, state.last, "", "", "") if state.open else None


def _number(row: Row, name: str, below: float = 0.0) -> float:
    """Return a metric; if it is missing or NaN, return `below`."""
    value = row.get(name)
    return below if value is None or math.isnan(value) else value


def _entropy(row: Row) -> float | None:
    return row.get("entropy", row.get("surprise"))
