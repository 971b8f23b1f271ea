"""Metrics that describe a rollout."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl4llm.algorithms.functional import differ
from rl4llm.core.base_env import SampleState
from rl4llm.core.types import TRUNCATED, Group, Trajectory

RESERVED = ("mean", "std")
NO_ANSWER = "no_answer"
QUOTED_CHARS = 200


@dataclass(frozen=True, slots=True)
class Episode:
    """What metrics need to know of a trajectory; small enough to be sent from rank to rank."""

    reward: float
    rewards: Mapping[str, float]
    policy_tokens: int
    prompt_tokens: int
    turns: int
    stop_reason: str
    notes: tuple[str, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)
    role: str = ""
    frozen: bool = False
    part: str = ""
    surprise: float = 0.0  # nats, of all of the policy's tokens together
    success: bool | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """What metrics need to know of a sample that failed."""

    kind: str
    part: str = ""
    notes: tuple[str, ...] = ()


def facts(groups: Sequence[Group]) -> list[list[Episode]]:
    """Return what metrics need of the trajectories of each group."""
    return [
        [
            Episode(
                member.reward,
                dict(member.rewards),
                member.num_policy_tokens,
                len(member.spans[0].token_ids),
                member.num_turns,
                member.stop_reason,
                tuple(_note_counts(member.extras)),
                {name: float(value) for name, value in member.extras.get("metrics", {}).items()},
                member.role,
                group.frozen,
                member.part,
                -math.fsum(logprob for span in member.policy_spans for logprob in span.logprobs or ()),
                member.success,
            )
            for member in group.trajectories
        ]
        for group in groups
    ]


def faults(failed: Sequence[SampleState]) -> list[Failure]:
    """Return what metrics need of the failed samples."""
    return [
        Failure(sample.failure_class, sample.special.part, tuple(_calls(sample.extras))) for sample in failed
    ]


def unread(trajectory: Trajectory) -> bool:
    """Return whether a reward reported that it found no answer, or the reward named format gave nothing."""
    notes = trajectory.extras.get("reward_notes", {}).values()
    return NO_ANSWER in notes or trajectory.rewards.get("format", 1.0) <= 0


def last_words(trajectory: Trajectory) -> str:
    """Return the end of the policy's last message, where an answer is looked for."""
    reply = next((item.content for item in reversed(trajectory.messages) if item.role == "assistant"), "")
    return reply if len(reply) <= QUOTED_CHARS else f"...{reply[-QUOTED_CHARS:]}"


def summarize(groups: Sequence[Group], failed: Sequence[SampleState] = ()) -> dict[str, float]:
    return summarize_facts(facts(groups), faults(failed))


def summarize_facts(groups: Sequence[Sequence[Episode]], failed: Sequence[Failure]) -> dict[str, float]:
    """Return metrics of all sampled trajectories, including those that do not train; `glossary` explains each.

    Those of a role or a part begin with role/<role>/ or part/<part>/. Frozen roles count only in their own. Without a
    trajectory there are only the failures and `trajectories`.
    """
    metrics = _summary(groups, failed)
    names = {member.part for group in groups for member in group} | {item.part for item in failed}
    for name in sorted(names - {""}):
        part_groups = [group for group in groups if any(member.part == name for member in group)]
        summary = _summary(part_groups, [item for item in failed if item.part == name])
        share = sum(map(len, part_groups)) / max(1, sum(map(len, groups)))
        metrics |= {f"part/{name}/{key}": value for key, value in {**summary, "share": share}.items()}
    return metrics


def _summary(groups: Sequence[Sequence[Episode]], failed: Sequence[Failure]) -> dict[str, float]:
    kinds = {
        f"failures/{kind}": float(count)
        for kind, count in sorted(Counter(item.kind for item in failed).items())
    }
    failures = {"failures": float(len(failed)), **kinds}
    metrics = _measures([group for group in groups if not any(member.frozen for member in group)])
    for note in (note for item in failed for note in item.notes):
        metrics[note] = metrics.get(note, 0.0) + 1.0
    metrics |= failures
    for role in dict.fromkeys(member.role for group in groups for member in group if member.role):
        summary = _measures([group for group in groups if any(member.role == role for member in group)])
        metrics |= {f"role/{role}/{name}": value for name, value in summary.items()}
    return metrics


def _measures(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    trajectories = [trajectory for group in groups for trajectory in group]
    if not trajectories:
        return {"trajectories": 0.0}
    lengths = sorted(episode.policy_tokens for episode in trajectories)
    reasons = Counter(episode.stop_reason for episode in trajectories)
    measured: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.measured.items():
            measured.setdefault(f"env/{name}", []).append(value)
    notes = Counter(note for trajectory in trajectories for note in trajectory.notes)
    equal = [not differ([episode.reward for episode in group]) for group in groups if len(group) > 1]
    spread = (
        {"groups/count": float(len(equal)), "groups/zero_spread": statistics.fmean(equal)} if equal else {}
    )
    return {
        **_rewards(trajectories),
        "completion_length/mean": statistics.fmean(lengths),
        "completion_length/p90": float(lengths[math.ceil(0.9 * len(lengths)) - 1]),
        "completion_length/max": float(lengths[-1]),
        "prompt_length/mean": statistics.fmean(episode.prompt_tokens for episode in trajectories),
        "truncated": sum(reasons[reason] for reason in TRUNCATED) / len(trajectories),
        **{f"stop/{reason}": count / len(trajectories) for reason, count in sorted(reasons.items())},
        **{name: statistics.fmean(numbers) for name, numbers in sorted(measured.items())},
        "turns": statistics.fmean(trajectory.turns for trajectory in trajectories),
        "surprise": sum(episode.surprise for episode in trajectories)
        / max(1, sum(episode.policy_tokens for episode in trajectories)),
        **spread,
        **{note: float(count) for note, count in sorted(notes.items())},
        "trajectories": float(len(trajectories)),
    }


def _rewards(trajectories: Sequence[Episode]) -> dict[str, float]:
    combined = [trajectory.reward for trajectory in trajectories]
    metrics = {"reward/mean": statistics.fmean(combined), "reward/std": statistics.pstdev(combined)}
    names = list(dict.fromkeys(name for trajectory in trajectories for name in trajectory.rewards))
    for name in names:
        scores = [trajectory.rewards[name] for trajectory in trajectories if name in trajectory.rewards]
        metrics[f"reward/{name}{'_' if name in RESERVED else ''}"] = statistics.fmean(scores)
    decided = [trajectory.success for trajectory in trajectories if trajectory.success is not None]
    if decided:
        metrics["accuracy"] = statistics.fmean(decided)
    return metrics


def _note_counts(extras: Mapping[str, Any]) -> Iterator[str]:
    """Yield the metrics that count what happened to one trajectory."""
    for reward, note in extras.get("reward_notes", {}).items():
        yield f"model_faults/{reward}/{note.partition(':')[0]}"
    if "played_again_after" in extras:
        yield f"played_again/{extras['played_again_after']}"
    yield from _calls(extras)


def _calls(extras: Mapping[str, Any]) -> Iterator[str]:
    """Yield what became of calls of tools, each as often as it happened."""
    for what, count in extras.get("tool_counts", {}).items():
        yield from [f"tool/{what}"] * count
