"""The source of groups: it starts episodes as soon as the bound on their staleness allows, and hands over the oldest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rl4llm.data.prompts import PromptStream
from rl4llm.envs.rollout import Episodes, Rollout, play_together
from rl4llm.runtime.runner import Runner, Running, end_all

if TYPE_CHECKING:
    from rl4llm.data.mixture import MixedPrompts
    from rl4llm.envs.mixture import MixedRollout


@dataclass(frozen=True, slots=True)
class Staleness:
    """How many versions older than the weights that it trains any token may be; with `repeatable`, versions do not depend
    on the clock: no episode plays during a publish or a checkpoint."""

    limit: int = 0
    repeatable: bool = False


@dataclass(slots=True, eq=False)
class Round:
    """Prompts that all ranks drew together, and the episodes of this rank's share.

    Its random numbers derive from its `number`, which a round that replaces groups of another shares with it, and from the
    count of such rounds. `cursor` is the state of the prompts before it. Of its `total` draws, which are numbered over all
    ranks, `taken` have been handed over; those of this rank begin at `first`.
    """

    number: int
    cursor: Mapping[str, Any]
    total: int
    first: int
    rows: Sequence[int]
    units: Sequence[Episodes]
    running: Running[None] | None = None  # once the engines have weights
    taken: int = 0

    @property
    def left(self) -> int:
        return self.total - self.taken

    def take(self, count: int) -> tuple[Sequence[int], Sequence[Episodes]]:
        """Return the rows and episodes of this rank among the next `count` draws."""
        begin, end = (max(0, place - self.first) for place in (self.taken, self.taken + count))
        self.taken += count
        if len(self.units) == len(self.rows):
            return self.rows[begin:end], self.units[begin:end]
        return self.rows, self.units

    def untaken(self) -> Iterator[tuple[int, Episodes]]:
        """Yield this rank's units that have not been handed over, each with the number of its first draw."""
        return ((place, unit) for place, unit in enumerate(self.units, self.first) if place >= self.taken)


class GroupStream:
    """Episodes under way, in the order in which their prompts were drawn.

        stream.admit(share)          # at most k steps before the one that trains them
        rows, units = stream.take(share)

    Draws are counted over all ranks, so that every rank admits and takes the same ones and plays its share.
    """

    def __init__(
        self,
        rollout: Rollout | MixedRollout,
        prompts: PromptStream | MixedPrompts,
        runner: Runner,
        how: Callable[[], Mapping[str, Any]],
    ):
        self._rollout = rollout
        self._prompts = prompts
        self._runner = runner
        self._how = how
        self._number = -1  # of the last round
        self._refill = 0
        self.rounds: deque[Round] = deque()  # not taken yet
        self.kept = 0  # draws of this rank that a checkpoint brought, played

    @property
    def left(self) -> int:
        """Return the number of draws that were admitted and not taken, over all ranks."""
        return sum(round_.left for round_ in self.rounds)

    def admit(self, total: int) -> None:
        """Draw `total` prompts, and start the episodes of this rank's share."""
        self._number, self._refill = self._number + 1, 0
        self.rounds.append(self._draw(total))
        self.rounds[-1].running = self._runner.start(play_together(self.rounds[-1].units))

    def take(self, total: int) -> tuple[list[int], list[Episodes]]:
        """Return the rows and episodes of this rank among the oldest `total` draws, when they have been played.

        Missing draws are a refill of the last round, and begin now. Raises the error that ended one of their rounds.
        """
        self._begin()
        rows: list[int] = []
        units: list[Episodes] = []
        while total:
            if not self.rounds or (self._rollout.plays_whole and total < self.rounds[0].left):
                self._refill += 1
                self.rounds.appendleft(self._draw(total))
                self._begin()
            oldest = self.rounds[0]
            count = min(total, oldest.left)
            # all ranks count the same draws, so each takes its share of them without asking the others
            own_rows, own_units = oldest.take(count)
            running = cast("Running[None]", oldest.running)  # `_begin` began it
            running.wait([unit.outcome for unit in own_units])
            for unit in own_units:
                (unit.outcome if unit.outcome.done() else running.outcome).result()
            if not oldest.left:
                self.rounds.popleft()
            rows += own_rows
            units += own_units
            total -= count
        return rows, units

    def drain(self) -> None:
        """Return when all episodes have been played, even with an error."""
        for running in self._running():
            running.wait([running.outcome])

    def close(self) -> bool:
        """Cancel the episodes that still play; return False if they do not end."""
        return end_all(self._running())

    def state(self) -> dict[str, Any]:
        """Return where a resumed run continues, as JSON values. `stored` keeps what was not taken."""
        rounds = [
            {name: getattr(round_, name) for name in ("number", "cursor", "total", "taken")}
            for round_ in self.rounds  # none replaces groups, as such a round is taken whole
        ]
        now = {"round": self._number, "refill": self._refill, "rounds": rounds}
        return {"prompts": self._prompts.state(), **now}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Episodes begin with the next draw, when the engines have the weights."""
        for round_ in state["rounds"]:
            self._prompts.restore(round_["cursor"])
            self._number = round_["number"]
            self.rounds.append(self._draw(round_["total"]))
            self.rounds[-1].taken = round_["taken"]
        self._prompts.restore(state["prompts"])
        self._number, self._refill = state["round"], state["refill"]

    def _running(self) -> list[Running[None]]:
        return [round_.running for round_ in self.rounds if round_.running is not None]

    def _begin(self) -> None:
        """Begin the episodes of a refill, and of the rounds that a checkpoint brought."""
        for round_ in self.rounds:
            if round_.running is None:
                round_.running = self._runner.start(play_together(round_.units))

    def _draw(self, total: int) -> Round:
        prompts = self._prompts
        cursor, rows = prompts.state(), prompts.next_batch(total)
        # The most samples that a round can have of one row.
        most = prompts.batch_size * prompts.world_size * (self._rollout.group_size + 1)
        units = self._rollout.begin(
            rows, step=self._number, first_index=self._refill * most, earlier=prompts.earlier, **self._how()
        )
        start = total * prompts.rank // prompts.world_size
        return Round(self._number, cursor, total, start, rows, units)
