"""A run that is sick looks like one that trains. These rules look at the metrics of its last steps and say what they see.

An alert begins when its sign was there for some steps on end, and is over when it was away for `CALM` steps: each is told
once, not in every step. The thresholds are meant to be silent in runs that learn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]

FIRST = 5  # steps that say how a run began
CALM = 3  # steps without the sign, after which an alert is over
CONSTANT_GROUPS = 64  # where one attempt in a hundred succeeds, so many groups of 8 are alike by chance in 0.6 % of cases
TRUNCATED = 0.95  # of the episodes of a step; a policy that is learning to stop is well below
COLLAPSED = 0.05  # of the entropy in the beginning; as low comes from success too, so only below this share of successes:
SUCCESS = 0.8
GROWN, NOTICEABLE, LARGE = 3.0, 0.02, 0.1  # times what it was; nats per token: bf16 differs from itself by about 0.01
MOST = 0.5  # of the attempts in one of several environments
LATE = 0.02  # of the attempts of a step; rollout.max_failed_share stops a run at 0.1 by default


@dataclass(frozen=True, slots=True)
class Rule:
    """`sign` says what is to be seen in a step, given the first steps, or nothing; `weight` counts towards `enough`."""

    name: str
    sign: Callable[[Row, Sequence[Row]], str | None]
    why: str
    look_at: str
    enough: float = 5.0
    weight: Callable[[Row], float] = lambda row: 1.0


@dataclass(frozen=True, slots=True)
class Alert:
    """Something begins, or is over: `until` is its last step. What was seen, why it matters, which keys to look at."""

    name: str
    step: int
    since: int
    until: int | None
    seen: str
    why: str
    look_at: str

    def __str__(self) -> str:
        if self.until is not None:
            return f"{self.name} is over: it was there from step {self.since} to {self.until}."
        return f"{self.name} since step {self.since}: {self.seen}. {self.why} Look at {self.look_at}."


def constant_reward(row: Row, first: Sequence[Row]) -> str | None:
    if _number(row, "groups/zero_spread") < 1.0:
        return None
    reward = row.get("reward/mean", math.nan)
    return f"within every group all attempts earn the same, {reward:.3g} on average"


def all_truncated(row: Row, first: Sequence[Row]) -> str | None:
    share = _number(row, "truncated", below=0.0)
    return f"{share:.0%} of the episodes run into a limit of tokens" if share >= TRUNCATED else None


def entropy_collapse(row: Row, first: Sequence[Row]) -> str | None:
    now, begin = _entropy(row), [entropy for one in first if (entropy := _entropy(one)) is not None]
    if now is None or not begin or len(begin) < len(first) or _number(row, "accuracy", below=0.0) >= SUCCESS:
        return None
    start = statistics.median(begin)
    return f"{now:.3g} nats per token, where it began with {start:.3g}" if now < COLLAPSED * start else None


def growing_mismatch(row: Row, first: Sequence[Row]) -> str | None:
    now = _number(row, "mismatch/mean", below=0.0)
    begin = [_number(one, "mismatch/mean", below=0.0) for one in first]
    if now > LARGE:
        return f"log-probs of engine and trainer differ by {now:.3g} nats per token"
    start = statistics.median(begin) if begin else math.inf
    if now <= max(NOTICEABLE, GROWN * start):
        return None
    return f"log-probs of engine and trainer differ by {now:.3g} nats per token, {start:.3g} in the beginning"


def no_gradient(row: Row, first: Sequence[Row]) -> str | None:
    """Where rewards differ; where they do not there is none, and the other alert says so."""
    if "skipped" in row or constant_reward(row, first) or not ({"trajectories", "loss"} & row.keys()):
        return None
    moved = row.get("grad_norm") or row.get("critic/grad_norm")
    return None if moved else "the gradient is 0, or there is none"


def timeouts(row: Row, first: Sequence[Row]) -> str | None:
    late = {name: count for name, count in row.items() if _is_late(name) and count}
    attempts = _number(row, "trajectories", below=0.0) + _number(row, "failures", below=0.0)
    if not late or sum(late.values()) < LATE * attempts:
        return None
    counts = ", ".join(f"{count:.0f} {name.partition('/')[2]}" for name, count in sorted(late.items()))
    return f"of {attempts:.0f} attempts took too long, and were left out or played again: {counts}"


def failing_part(row: Row, first: Sequence[Row]) -> str | None:
    """An environment may fail as a whole and still be too few of a step's attempts for rollout.max_failed_share."""
    for name in row:
        if name.startswith("part/") and name.endswith("/failures"):
            failed, part = _number(row, name, below=0.0), name.removesuffix("/failures")
            attempts = failed + _number(row, f"{part}/trajectories", below=0.0)
            if failed and failed >= MOST * attempts:
                return f"of {part.partition('/')[2]}, {failed:.0f} of {attempts:.0f} attempts failed"
    return None


RULES = (
    Rule(
        "constant reward",
        constant_reward,
        "Nothing can be learned from groups without a difference.",
        "data.path (too hard, or solved), rewards, rollout.group_size and rollout.temperature",
        enough=CONSTANT_GROUPS,
        weight=lambda row: _number(row, "groups/count", below=0.0),
    ),
    Rule(
        "everything truncated",
        all_truncated,
        "What has no end cannot be scored for its answer, and is taught to be long or short by accident.",
        "rollout.max_tokens, rollout.stop, and whether the chat template's end of turn is the model's",
    ),
    Rule(
        "entropy collapse",
        entropy_collapse,
        "A policy that always says the same explores no longer, and this one is not good yet.",
        "training.lr, algorithm.clip_high, algorithm.kl_coef and algorithm.entropy_coef",
    ),
    Rule(
        "growing mismatch",
        growing_mismatch,
        "What is sampled from one distribution and learned as if from another biases every step.",
        "model.dtype and the engine's, its kernels and quantization, sync; mismatch.stop_above stops a run on it",
    ),
    Rule(
        "no gradient",
        no_gradient,
        "Steps are taken, and the weights do not change.",
        "algorithm (what it drops or masks), model.lora, and training.lr",
    ),
    Rule(
        "timeouts",
        timeouts,
        "What is left out is not random: the longest and hardest episodes are missing from what is learned.",
        "the time limits of rewards, tools and env, sandbox.slots, and the load of this machine",
        enough=3.0,
    ),
    Rule(
        "failing part",
        failing_part,
        "The run goes on without this environment, which the others outnumber.",
        "failures/<class> of the part, its env and rewards, and env.remote",
        enough=3.0,
    ),
)


@dataclass(slots=True)
class _State:
    found: float = 0.0  # of what is enough
    away: int = 0
    since: int = -1  # step with the first sign
    last: int = 0  # step with the sign
    open: bool = False


@dataclass(slots=True)
class Alerts:
    """Takes the metrics of each step in order, and says what begins and what is over.

    What it knows comes from the rows alone: a resumed run is shown its earlier ones, and goes on without telling twice.
    """

    rules: Sequence[Rule] = RULES
    _first: list[Row] = field(default_factory=list)
    _states: dict[str, _State] = field(default_factory=dict)

    def take(self, step: int, row: Row) -> list[Alert]:
        """What this step changes."""
        found = [self._apply(rule, step, row) for rule in self.rules]
        if len(self._first) < FIRST:
            self._first.append(row)
        return [alert for alert in found if alert]

    @property
    def open(self) -> dict[str, int]:
        """The alerts that are not over, and the step in which each began."""
        return {name: state.since for name, state in self._states.items() if state.open}

    def _apply(self, rule: Rule, step: int, row: Row) -> Alert | None:
        state = self._states.setdefault(rule.name, _State())
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
        self._states[rule.name] = _State()
        return Alert(rule.name, step, state.since, state.last, "", "", "") if state.open else None


def _number(row: Row, name: str, below: float = -math.inf) -> float:
    """A metric; where it is missing, or was no number, what is below every threshold."""
    value = row.get(name)
    return below if value is None or math.isnan(value) else value


def _entropy(row: Row) -> float | None:
    return row.get("entropy", row.get("surprise"))


def _is_late(name: str) -> bool:
    return name.startswith(("failures/", "played_again/")) and name.endswith("/timeout")
