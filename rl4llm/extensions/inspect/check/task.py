"""What the policy can do before training: sample it on a few prompts, and say what its groups would teach."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import comb

from rl4llm.config import Config
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import ConfigError
from rl4llm.core.message import shortened
from rl4llm.core.types import TRUNCATED, Group, Trajectory
from rl4llm.envs.mixture import MixedRollout
from rl4llm.envs.rollout import Rollout
from rl4llm.extensions.inspect.check.bench import Bench
from rl4llm.tracking.summary import QUOTED_CHARS, last_words, summarize, unread
from rl4llm.trainers.rl import RLTrainer

MANY, FEW, MOST = 0.2, 0.05, 0.95
"""Shares of episodes or groups at which the report gives advice."""
QUOTED = 3


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What was measured: `metrics` as in a run's log, answers in a wrong format, times, and what to change.

    `quoted` are ground truths and the answers to them, those first that no reward could read; `refused` are calls that got
    errors.
    `teaches` is whether any group has rewards that differ. Methods that compare them need such groups. `other_sizes` has the
    share of such groups that is expected with other group sizes.
    """

    prompts: int
    group_size: int
    metrics: Mapping[str, float]
    no_answer: float
    quoted: Sequence[tuple[str, str]]
    refused: Sequence[str]
    teaches: bool
    other_sizes: Mapping[int, float]
    advice: Sequence[str]

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        found = self.metrics
        episodes = int(found["trajectories"])
        yield f"sampled {episodes} episodes: {self.prompts} prompts, group size {self.group_size}"
        success = (
            f"{found['accuracy']:.1%}" if "accuracy" in found else "not defined by any reward (success_at)"
        )
        yield f"success       {success}, mean reward {found.get('reward/mean', 0.0):.3f}"
        yield f"groups        {1 - found.get('groups/zero_spread', 0.0):.1%} have rewards that differ, and so a gradient"
        words = {True: "at least", False: "about"}
        others = [
            f"{words[size > self.group_size]} {share:.0%} with rollout.group_size={size}"
            for size, share in self.other_sizes.items()
        ]
        yield from [f"  {', '.join(others)}"] if others else []
        yield f"format        {self.no_answer:.1%} have no answer, as the rewards report"
        yield from (f"  ground truth {truth}, answer {text!r}" for truth, text in self.quoted)
        length = f"{found.get('completion_length/mean', 0.0):.0f} tokens on average"
        yield f"truncated     {found.get('truncated', 0.0):.1%}, {length}"
        if "env/tool_calls" in found:
            calls, errors = found["env/tool_calls"], found.get("env/tool_errors", 0.0)
            yield f"tools         {calls:.2f} calls an episode, {errors:.2f} errors"
            yield from (f"  for example {text}" for text in self.refused)
        if found.get("failures"):
            yield f"failed        {found['failures']:.0f} episodes, which would be left out"
        yield from (f"change        {text}" for text in self.advice)
        if not self.advice:
            yield "change        nothing: this task can be trained as it is"


def examine(config: Config, prompts: int) -> TaskReport:
    """Play groups of the run's size on the first `prompts` prompts that it would train on.

    Nothing of the run is read or written: the policy is `model.path`. Raises ConfigError if nothing is sampled.
    """
    if prompts < 1:
        raise ConfigError(f"--prompts {prompts} is not accepted. Accepted: 1 or more.")
    with closing(Bench(config)) as bench:
        trainer = bench.build()
        if not isinstance(trainer, RLTrainer):
            name = config.algorithm["name"]
            raise ConfigError(
                f"--task is not accepted with algorithm.name={name!r}, which learns from a dataset and samples nothing. "
                "Run `rl4llm check` without it."
            )
        trainer.publish()
        return _examined(trainer, config, prompts)


def _examined(trainer: RLTrainer, config: Config, prompts: int) -> TaskReport:
    prompts = min(prompts, trainer.rollout.num_rows)
    needs = trainer.algorithm.needs()
    result = trainer.rollout.play(
        trainer.prompts.next_batch(prompts),
        step=0,
        sampling_params=trainer.sampling_params,
        sampling=needs.sampling,
        greedy_baseline=needs.greedy_baseline,
    )
    groups = [group for group in result.groups if not group.frozen]
    if not groups:
        raise ConfigError(f"No episode of {len(result.failed)} ended: {result.failed[0].failure}")
    metrics = summarize(result.groups, result.failed)
    members = [one for group in groups for one in group.trajectories]
    without = [one for one in members if unread(one)]
    no_answer = len(without) / len(members)
    examples = without or [group.trajectories[0] for group in groups]
    return TaskReport(
        prompts=prompts,
        group_size=trainer.rollout.group_size,
        metrics=metrics,
        no_answer=no_answer,
        quoted=[
            (shortened(repr(one.extras["ground_truth"]), QUOTED_CHARS), last_words(one))
            for one in examples[:QUOTED]
        ],
        refused=_refused_calls(members),
        teaches=metrics.get("groups/zero_spread", 0.0) < 1,
        other_sizes={
            size: would_teach(groups, size)
            for size in (trainer.rollout.group_size // 2, trainer.rollout.group_size * 2)
            if size > 1 and trainer.rollout.group_size > 1
        },
        advice=[
            *_of_tools(metrics),
            *_of_length(trainer, config, members),
            *_advice(trainer, config, metrics, no_answer),
        ],
    )


def would_teach(groups: Sequence[Group], size: int) -> float:
    """Return the share of prompts with rewards that are expected to differ between `size` samples.

    Up to the number of samples that were played this is the mean over all subsets of them. For more it is at least the
    result: 1 - p^size - (1 - p)^size with the measured share p of each prompt, or the share that was seen if that is larger.
    """
    equal, seen = [], []
    for group in groups:
        counts = Counter(round(one.reward, 9) for one in group.trajectories).values()
        played = sum(counts)
        few = size <= played
        equal.append(sum(comb(n, size) / comb(played, size) if few else (n / played) ** size for n in counts))
        seen.append(float(len(counts) > 1 and not few))
    return max(1 - statistics.fmean(equal), statistics.fmean(seen))


def _refused_calls(members: Sequence[Trajectory]) -> list[str]:
    """Return the most frequent errors that tools answered, each with a turn that got it."""
    found: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for one in members:
        said = ""
        for message in one.messages:
            if message.role == "assistant":
                said = message.content
            elif message.role == "tool" and message.failed:
                counts[message.content] += 1
                found.setdefault(message.content, said)
    return [
        f"{found[error][-QUOTED_CHARS:]!r} got {error[:QUOTED_CHARS]!r}"
        for error, _ in counts.most_common(QUOTED)
    ]


def _advice(
    trainer: RLTrainer, config: Config, found: Mapping[str, float], no_answer: float
) -> Iterator[str]:
    """Yield what to change in the prompts and the groups, the most important first."""
    success, equal = found.get("accuracy"), found.get("groups/zero_spread", 0.0)
    if no_answer >= MANY:
        key = "the environment's prompts (env.system_prompt, if it has this option)"
        key = key if config.data.path is None else "data.system_prompt"
        yield (
            f"{no_answer:.0%} of the answers lack the format of the reward{_format(trainer)}. Ask for it in {key}, choose "
            "another `extract` of the reward, or teach the format with SFT first (`configs/sft.yaml`)."
        )
    elif equal >= MOST and (success is None or success <= FEW):
        right = "" if success is None else ", and nearly nothing is right"
        yield (
            f"Nearly every group scores the same{right}. Use easier prompts, a stronger model, a reward with partial "
            "credit, or SFT first (`configs/sft.yaml`)."
        )
    if equal >= MOST and (success or 0.0) >= MOST:
        yield "Nearly everything is right already. Use harder prompts."
    elif MOST > equal >= 1 - MANY:
        yield (
            f"Only {1 - equal:.0%} of the groups teach something. Raise rollout.group_size={config.rollout.group_size}, or "
            "use prompts that the model solves sometimes (curriculum, or algorithm.name=dapo, which draws others)."
        )


def _of_length(trainer: RLTrainer, config: Config, members: Sequence[Trajectory]) -> Iterator[str]:
    cut = [one for one in members if one.stop_reason in TRUNCATED]
    if len(cut) < MANY * len(members):
        return
    context = trainer.inference.client.context_length
    sizes = [sum(len(span.token_ids) for span in record) for one in cut for record in one.records[-1:]]
    full = sum(size >= context for size in sizes)
    key = f"Raise rollout.max_tokens={config.rollout.max_tokens}"
    if 2 * full > len(cut):
        key = f"They fill the model's context of {context} tokens. Shorten the prompts or the descriptions of tools"
    yield f"{len(cut) / len(members):.0%} of the episodes are cut off. {key}, or ask for shorter answers."


def _of_tools(found: Mapping[str, float]) -> Iterator[str]:
    calls, errors = found.get("env/tool_calls"), found.get("env/tool_errors", 0.0)
    if calls is not None and calls < MANY:
        yield (
            f"The model calls tools {calls:.2f} times an episode. Show a call in the system prompt, or teach calls with SFT "
            "first (`configs/sft.yaml`)."
        )
    elif calls and errors / calls >= 1 - MANY:
        yield (
            f"{errors / calls:.0%} of the calls are errors, such as those above. Change the tool's description or "
            "arguments, or teach calls with SFT first. Demonstrations must show the same tools: set env.tools in both runs, "
            "or env.describe_tools=false here if they show none."
        )


def _format(trainer: RLTrainer) -> str:
    """Return an answer that a reward promises to score best, as text behind "the format of the reward"."""
    rollout = trainer.rollout
    parts: Sequence[Rollout] = rollout.parts if isinstance(rollout, MixedRollout) else [rollout]
    shown = [_right(reward) for part in parts for reward in part.env.reward_functions]
    return next((f", which reads for example {text!r}" for text in shown if text), "")


def _right(reward: BaseRewardFunction) -> str:
    scored = [item for item in reward.examples() if isinstance(item.score, int | float)]
    if not scored:
        return ""
    best = max(scored, key=lambda item: float(item.score) if isinstance(item.score, int | float) else 0.0)
    return best.messages[-1].content
