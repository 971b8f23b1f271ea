"""What a rollout was like, in the metric names that the field uses."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl4llm.core.base_env import SampleState
from rl4llm.core.types import Group, Trajectory

TRUNCATED = ("length", "context")
RESERVED = ("mean", "std")


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


@dataclass(frozen=True, slots=True)
class Failure:
    """What metrics need to know of a sample that failed."""

    kind: str
    part: str = ""


def facts(groups: Sequence[Group]) -> list[list[Episode]]:
    """The trajectories of each group, as metrics see them."""
    return [[_fact(trajectory, group.frozen) for trajectory in group.trajectories] for group in groups]


def faults(failed: Sequence[SampleState]) -> list[Failure]:
    """The failed samples, as metrics see them."""
    return [Failure(sample.failure_class, sample.part) for sample in failed]


def succeeded(rewards: Mapping[str, float]) -> bool:
    """Whether the reward named "accuracy", or else the first one, is at least 1."""
    return rewards.get("accuracy", next(iter(rewards.values()), 0.0)) >= 1.0


def summarize(groups: Sequence[Group], failed: Sequence[SampleState] = ()) -> dict[str, float]:
    """`summarize_facts` of groups and failed samples."""
    return summarize_facts(facts(groups), faults(failed))


def summarize_facts(groups: Sequence[Sequence[Episode]], failed: Sequence[Failure]) -> dict[str, float]:
    """Metrics of all trajectories that were sampled, whether they train or not.

    reward/mean, reward/std      of the combined reward over all trajectories (population standard deviation)
    reward/<name>                mean of each reward; one named "mean" or "std" becomes reward/mean_, reward/std_
    accuracy                     share of trajectories whose reward named "accuracy", or else first reward, is at least 1
    completion_length/...        mean, p90 and max of the tokens that the policy wrote, all turns together
    prompt_length/mean           tokens that the trajectories start from
    turns                        mean number of times the policy spoke
    truncated                    share that ran into a token limit or the end of the context
    stop/<reason>                share of each stop reason
    env/<name>                   mean of what the environment measured, over the trajectories for which it did
    surprise                     mean negative log-prob, in nats, of a token that the policy wrote, as the engine saw it:
                                 where it samples at temperature 1, an estimate of the policy's entropy
    groups/count                 how many groups have more than one trajectory, where there are any
    groups/zero_spread           share of those whose rewards are all equal, which teach a group-relative algorithm nothing
    model_faults/<reward>/<why>  how many a reward gave 0 for more than a wrong answer, such as math/timeout
    played_again/<class>         how many were finished at the second attempt, by what had failed the first
    trajectories, failures       how many were finished, and how many failed through no fault of the policy
    failures/<class>             the latter by class, such as env/timeout or math/unavailable
    role/<role>/...              all but the failures once more for the trajectories of each role
    part/<part>/...              all once more for each environment, where several are played, and its `share` of them

    Without any trajectory only the failures and `trajectories` are there. Roles that are frozen count in no metric but
    their own.
    """
    return {**_of_one(groups, failed), **_by_part(groups, failed)}


def _of_one(groups: Sequence[Sequence[Episode]], failed: Sequence[Failure]) -> dict[str, float]:
    kinds = {f"failures/{kind}": float(count) for kind, count in sorted(Counter(item.kind for item in failed).items())}
    failures = {"failures": float(len(failed)), **kinds}
    return {**_of([group for group in groups if not any(member.frozen for member in group)]), **failures, **_by_role(groups)}


def _by_part(groups: Sequence[Sequence[Episode]], failed: Sequence[Failure]) -> dict[str, float]:
    names = sorted({member.part for group in groups for member in group} | {item.part for item in failed} - {""})
    metrics: dict[str, float] = {}
    for name in filter(None, names):
        own = [group for group in groups if any(member.part == name for member in group)]
        found = _of_one(own, [item for item in failed if item.part == name])
        share = sum(map(len, own)) / max(1, sum(map(len, groups)))
        metrics |= {f"part/{name}/{key}": value for key, value in {**found, "share": share}.items()}
    return metrics


def _by_role(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    roles = dict.fromkeys(member.role for group in groups for member in group if member.role)
    return {
        f"role/{role}/{name}": value
        for role in roles
        for name, value in _of([group for group in groups if any(member.role == role for member in group)]).items()
    }


def _of(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    """Metrics of the trajectories of groups."""
    trajectories = [trajectory for group in groups for trajectory in group]
    if not trajectories:
        return {"trajectories": 0.0}
    return {
        **_rewards(trajectories),
        **_lengths(trajectories),
        **_stops(trajectories),
        **_measured(trajectories),
        "turns": statistics.fmean(trajectory.turns for trajectory in trajectories),
        "surprise": sum(one.surprise for one in trajectories) / max(1, sum(one.policy_tokens for one in trajectories)),
        **_spread([group for group in groups if len(group) > 1]),
        **{note: float(count) for note, count in sorted(Counter(_notes(trajectories)).items())},
        "trajectories": float(len(trajectories)),
    }


def _notes(trajectories: Sequence[Episode]) -> Iterator[str]:
    return (note for trajectory in trajectories for note in trajectory.notes)


def _measured(trajectories: Sequence[Episode]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.measured.items():
            values.setdefault(f"env/{name}", []).append(value)
    return {name: statistics.fmean(found) for name, found in sorted(values.items())}


def _rewards(trajectories: Sequence[Episode]) -> dict[str, float]:
    combined = [trajectory.reward for trajectory in trajectories]
    metrics = {"reward/mean": statistics.fmean(combined), "reward/std": statistics.pstdev(combined)}
    names = list(dict.fromkeys(name for trajectory in trajectories for name in trajectory.rewards))
    for name in names:
        scores = [trajectory.rewards[name] for trajectory in trajectories if name in trajectory.rewards]
        metrics[f"reward/{name}{'_' if name in RESERVED else ''}"] = statistics.fmean(scores)
    if names:
        metrics["accuracy"] = statistics.fmean(succeeded(trajectory.rewards) for trajectory in trajectories)
    return metrics


def _lengths(trajectories: Sequence[Episode]) -> dict[str, float]:
    lengths = sorted(trajectory.policy_tokens for trajectory in trajectories)
    return {
        "completion_length/mean": statistics.fmean(lengths),
        "completion_length/p90": float(lengths[math.ceil(0.9 * len(lengths)) - 1]),
        "completion_length/max": float(lengths[-1]),
        "prompt_length/mean": statistics.fmean(trajectory.prompt_tokens for trajectory in trajectories),
    }


def _stops(trajectories: Sequence[Episode]) -> dict[str, float]:
    reasons = Counter(trajectory.stop_reason for trajectory in trajectories)
    shares = {f"stop/{reason}": count / len(trajectories) for reason, count in sorted(reasons.items())}
    return {"truncated": sum(reasons[reason] for reason in TRUNCATED) / len(trajectories), **shares}


def _spread(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    if not groups:
        return {}
    return {"groups/count": float(len(groups)), "groups/zero_spread": statistics.fmean(map(_zero_spread, groups))}


def _zero_spread(group: Sequence[Episode]) -> bool:
    rewards = [trajectory.reward for trajectory in group]
    return min(rewards) == max(rewards)


def _fact(trajectory: Trajectory, frozen: bool) -> Episode:
    return Episode(
        trajectory.reward,
        dict(trajectory.rewards),
        trajectory.num_policy_tokens,
        len(trajectory.spans[0].token_ids),
        trajectory.num_turns,
        trajectory.stop_reason,
        tuple(_noted(trajectory.extras)),
        {name: float(value) for name, value in trajectory.extras.get("metrics", {}).items()},
        trajectory.role,
        frozen,
        trajectory.part,
        -math.fsum(logprob for span in trajectory.policy_spans for logprob in span.logprobs or ()),
    )


def _noted(extras: Mapping[str, Any]) -> Iterator[str]:
    """The metrics that count what happened to one trajectory."""
    for reward, note in extras.get("reward_notes", {}).items():
        yield f"model_faults/{reward}/{note.partition(':')[0]}"
    if "played_again_after" in extras:
        yield f"played_again/{extras['played_again_after']}"
