"""Groups of earlier steps, which train once more in the places of groups that teach nothing."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rl4llm.core.types import Group, Origin, Trajectory, Update
from rl4llm.envs.stored import span_of, span_row
from rl4llm.runtime.ranks import Ranks
from rl4llm.trainers.prepare import NO_CREDIT
from rl4llm.trainers.rl import RLStep, RLTrainer

SCORED = ("prompt_id", "rewards", "reward", "stop_reason", "role", "part", "successes")
"""Fields of a trajectory that are JSON values."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A group, and its `spread`: how much its trajectories were better or worse than expected, on average."""

    spread: float
    group: Group
    key: tuple[Any, ...] = field(init=False)  # the same wherever it is stored; the best group has the lowest

    def __post_init__(self) -> None:
        tokens = chain.from_iterable(trajectory.token_ids for trajectory in self.group.trajectories)
        content = zlib.crc32(array("q", tokens))
        key = (-self.spread, -self.version, self.group.prompt_id, self.group.role, content)
        object.__setattr__(self, "key", key)

    @property
    def version(self) -> int:
        """The oldest version of the weights that sampled any of it."""
        return min((trajectory.version for trajectory in self.group.trajectories), default=0)


class ReplayTrainer(RLTrainer):
    """Fills the places of groups that do not train with groups of earlier steps.

    Groups with equal credits do not train. A step has as many places as it begins with prompts, and so has the store.
    """

    def __init__(self, *, max_age: int, **base: Any):
        super().__init__(**base)
        self.mixes_versions = True
        self.replay = Replay(self.prompts.batch_size * self.ranks.size, max_age, self.ranks)
        self.replayed: list[Group] = []  # in this step

    def collect(self) -> RLStep:
        step = super().collect()
        trained, played = self._count(step)
        places = min(played, self._total(self.rollout.count_groups(step.rows))) - trained
        stored = self.replay.take(max(places, 0), self.step)
        self.replayed = [one.group for one in stored]
        self.replay.add((self._spread(group), group) for group in step.groups if self._trains(group))
        count, age = self._total(len(stored)), self._total(sum(self.step - one.version for one in stored))
        step.counts |= {"replay/groups": count, "replay/age": age / max(count, 1)}
        if self.staleness.limit:
            step.counts |= self._staleness(replace(step, groups=[*step.groups, *self.replayed]))
        return step

    def prepare(self, step: RLStep) -> list[Update]:
        """Return the optimizer steps over the groups of the step and the replayed ones, which the log does not show."""
        whole = replace(step, groups=[*step.groups, *self.replayed])
        updates = super().prepare(whole)
        step.credits, step.trained = whole.credits[: len(step.groups)], whole.trained
        return updates

    def write_checkpoint(self, directory: Path) -> dict[str, str]:
        self.replay.write(directory)
        return super().write_checkpoint(directory)

    def restore_files(self, directory: Path) -> None:
        super().restore_files(directory)
        self.replay.read(directory)

    def _trains(self, group: Group) -> bool:
        """Return whether a group trains; of credits that are NaN, those who check credits decide."""
        return super()._trains(group) and not self._spread(group) <= NO_CREDIT

    def _spread(self, group: Group) -> float:
        return float(self.algorithm.credits(group).abs().mean())


class Replay:
    """The groups of its last steps that a run stores, each on the rank that played it.

    All ranks agree which groups of all ranks are the best, by spread and then by age. So any number of ranks stores and
    trains the same groups. A stored group trains once more at most. It keeps its tokens, with the log-probs of the weights
    that sampled them, and its rewards, but neither messages nor extras.

    Args:
        size: how many groups all ranks store together.
        max_age: how many versions older than the weights that it trains any token may be.
    """

    def __init__(self, size: int, max_age: int, ranks: Ranks):
        self.size = size
        self.max_age = max_age
        self.ranks = ranks
        self.stored: list[Stored] = []

    def take(self, places: int, step: int) -> list[Stored]:
        """Return this rank's part of the best groups for the `places` of all ranks, and forget them."""
        self.stored = [one for one in self.stored if step - one.version <= self.max_age]
        best = self._best(places)
        self.stored = [one for one in self.stored if one not in best]
        return best

    def add(self, groups: Iterable[tuple[float, Group]]) -> None:
        """Store groups with their spreads; the worst groups of all ranks leave."""
        self.stored += [Stored(spread, _without_texts(group)) for spread, group in groups]
        self.stored = self._best(self.size)

    def write(self, directory: Path) -> None:
        with open(directory / f"replay-{self.ranks.rank}.jsonl", "w") as file:
            file.writelines(f"{json.dumps(_row(one))}\n" for one in self.stored)

    def read(self, directory: Path) -> None:
        """Take over what `write` wrote; other ranks than before share all groups evenly."""
        rank, size, files = self.ranks.rank, self.ranks.size, sorted(directory.glob("replay-*.jsonl"))
        if len(files) == size:
            rank, size, files = 0, 1, [directory / f"replay-{rank}.jsonl"]
        lines = [line for file in files for line in file.open()]
        self.stored = [_stored(json.loads(line)) for line in lines[rank::size]]

    def _best(self, count: int) -> list[Stored]:
        """Return this rank's part of the `count` best groups of all ranks, in order."""
        keys = self.ranks.everyone([one.key for one in self.stored])
        order = sorted((key, rank, place) for rank, part in enumerate(keys) for place, key in enumerate(part))
        return [self.stored[place] for _, rank, place in order[:count] if rank == self.ranks.rank]


def _without_texts(group: Group) -> Group:
    def bare(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, messages=(), extras={})

    baseline = None if group.baseline is None else bare(group.baseline)
    return replace(group, trajectories=tuple(map(bare, group.trajectories)), baseline=baseline)


def _row(one: Stored) -> dict[str, Any]:
    members = [*one.group.trajectories, *filter(None, [one.group.baseline])]
    return {
        "spread": one.spread,
        "baseline": one.group.baseline is not None,
        "members": [
            {
                **{name: getattr(member, name) for name in SCORED},
                "turn_rewards": member.turn_rewards,
                "records": [[span_row(span) for span in record] for record in member.records],
                "origins": [origin and astuple(origin) for origin in member.origins],
            }
            for member in members
        ],
    }


def _stored(row: Mapping[str, Any]) -> Stored:
    members = [_trajectory(member) for member in row["members"]]
    baseline = members.pop() if row["baseline"] else None
    return Stored(row["spread"], Group(members[0].prompt_id, tuple(members), baseline))


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    spans, *forks = (tuple(span_of(*span) for span in record) for record in row["records"])
    return Trajectory(
        **{name: row[name] for name in SCORED},
        spans=spans,
        forks=tuple(forks),
        messages=(),
        turn_rewards=tuple(row["turn_rewards"]),
        origins=tuple(origin and Origin(*origin) for origin in row["origins"]),
    )
