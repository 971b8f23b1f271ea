"""The source of groups: it starts episodes as soon as the bound on their staleness allows, and hands over the oldest."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import TooManyFailuresError
from rl4llm.core.sample import EnvState, EpisodeState, SampleState, Special, messages_of, pool_of
from rl4llm.core.types import SamplingParams
from rl4llm.data.prompts import PromptStream
from rl4llm.envs.policy import PolicyLLM
from rl4llm.runtime.runner import Runner, Running, end_all
from rl4llm.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from rl4llm.data.mixture import MixedPrompts
    from rl4llm.envs.mixture import MixedRollout
    from rl4llm.envs.rollout import Rollout

Episode = list[SampleState]
"""A sample for each role that the policy plays: one unless the environment has several roles."""


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
        return sum(one.left for one in self.rounds)

    def admit(self, total: int) -> None:
        """Draw `total` prompts, and start the episodes of this rank's share."""
        self._number, self._refill = self._number + 1, 0
        self.rounds.append(self._draw(total))
        self._start()

    def take(self, total: int) -> tuple[list[int], list[Episodes]]:
        """Return the rows and episodes of this rank among the oldest `total` draws, when they have been played.

        Missing draws are a refill of the last round, and begin now. Raises the error that ended one of their rounds.
        """
        self._start()
        rows: list[int] = []
        units: list[Episodes] = []
        while total:
            if not self.rounds or (self._rollout.plays_whole and total < self.rounds[0].left):
                self._refill += 1
                self.rounds.appendleft(self._draw(total))
                self._start()
            oldest = self.rounds[0]
            count = min(total, oldest.left)
            own_rows, own_units = oldest.take(count)
            running = cast("Running[None]", oldest.running)  # `_start` began it
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
            {name: getattr(one, name) for name in ("number", "cursor", "total", "taken")}
            for one in self.rounds  # none replaces groups, as such a round is taken whole
        ]
        now = {"round": self._number, "refill": self._refill, "rounds": rounds}
        return {"prompts": self._prompts.state(), **now}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Episodes begin with the next draw, when the engines have the weights."""
        for one in state["rounds"]:
            self._prompts.restore(one["cursor"])
            self._number = one["number"]
            self.rounds.append(self._draw(one["total"]))
            self.rounds[-1].taken = one["taken"]
        self._prompts.restore(state["prompts"])
        self._number, self._refill = state["round"], state["refill"]

    def _running(self) -> list[Running[None]]:
        return [one.running for one in self.rounds if one.running is not None]

    def _start(self) -> None:
        """Begin the episodes of new rounds, except those that have been played."""
        for one in self.rounds:
            if one.running is None:
                left = [unit for unit in one.units if not unit.outcome.done()]
                one.running = self._runner.start(play_together(left))

    def _draw(self, total: int) -> Round:
        prompts = self._prompts
        cursor, rows = prompts.state(), prompts.next_batch(total)
        # The most samples that a round can have of one row.
        most = prompts.batch_size * prompts.world_size * (self._rollout.group_size + 1)
        units = self._rollout.begin(
            rows, step=self._number, first_index=self._refill * most, earlier=prompts.earlier, **self._how()
        )
        first = total * prompts.rank // prompts.world_size
        return Round(self._number, cursor, total, first, rows, units)


@dataclass(slots=True, eq=False)
class Episodes:
    """The episodes of one prompt, or of several if the environment has its own interaction loop, and what begins them.

    The `size` episodes of a prompt are consecutive. `outcome` is set when all have been played and scored.
    """

    rollout: Rollout
    begin: Sequence[Callable[[], Episode]]
    size: int
    step: int
    sampling_params: SamplingParams
    all: list[Episode] = field(init=False)
    outcome: Future[None] = field(default_factory=Future)
    _llm: PolicyLLM | None = None

    def __post_init__(self) -> None:
        self.all = [begin() for begin in self.begin]

    @property
    def samples(self) -> list[SampleState]:
        return [sample for episode in self.all for sample in episode]

    def by_role(self) -> Iterator[Sequence[SampleState]]:
        """Yield the samples of each role for each draw of a prompt, which become a group."""
        for first in range(0, len(self.all), self.size):
            yield from zip(*self.all[first : first + self.size], strict=True)

    async def announce(self) -> None:
        """Announce all episodes to the engine, which may wait for them from now on."""
        state = EnvState(self.samples, self.step)
        self._llm = self.rollout.policy(state)
        if not self.rollout.plays_whole:
            for sample in state.episodes:
                await self._llm.open(sample)

    async def play(self) -> None:
        """Play all announced episodes, then once more those that failed, from their seed, and score them."""
        assert self._llm is not None  # they were announced
        await self._play(self.all, self._llm)
        failed = [number for number, episode in enumerate(self.all) if _failed(episode)]
        for number in failed:
            first_failure = self.all[number][0].failure_class
            self.all[number] = self.begin[number]()
            for sample in self.all[number]:
                sample.extras["played_again_after"] = first_failure
        if again := [self.all[number] for number in failed]:
            samples = [sample for episode in again for sample in episode]
            await self._play(again, self.rollout.policy(EnvState(samples, self.step)))
        await self.rollout.score(self)
        self.outcome.set_result(None)

    async def _play(self, episodes: Sequence[Episode], llm: PolicyLLM) -> None:
        samples = [sample for episode in episodes for sample in episode]
        try:
            await self.rollout.interact(EnvState(samples, self.step), llm, self.sampling_params)
        finally:
            await llm.end()
        name = type(self.rollout.env).__name__
        for episode in episodes:
            if not _failed(episode) and not any(sample.policy_spans for sample in episode):
                new = (message for sample in episode for message in sample.messages[sample.init_msg_size :])
                problem = "before the policy took a turn"
                if any(message.role == "assistant" for message in new):
                    problem = "without the sampled text as an assistant message; append it unchanged"
                episode[0].fail(f"{name} ended the episode {problem}", "env/contract")
            for sample in episode:
                check_turns(self.rollout.env, sample)
                sample.finish("done")  # unless it has another reason; a level-3 loop may give none


async def play_together(units: Sequence[Episodes]) -> None:
    """Play all episodes at once, after announcing all of them to the engine; interaction loops of users follow one by one.

    The first error ends all of them, and is that of each unit that has not been played.
    """
    by_users = [unit for unit in units if unit.rollout.plays_whole]
    try:
        for unit in units:
            await unit.announce()
        async with asyncio.TaskGroup() as playing:
            for unit in units:
                if unit not in by_users:
                    playing.create_task(unit.play())
        for unit in by_users:
            await unit.play()
    except BaseException as error:  # noqa: BLE001 - raised again, here and where an outcome is awaited
        cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        for unit in units:
            if not unit.outcome.done():
                unit.outcome.set_exception(cause)
        raise cause from None


def begin_episode(
    env: BaseMDPEnv, row: int, index: int, special: Special, *, seed: int, step: int
) -> Episode:
    """Return the samples of a new episode of one of the dataset's rows, one for each of the policy's roles."""
    columns = dict(env.dataset[row])
    pool = pool_of(columns, env.pool_column)
    columns["messages"] = task = messages_of(columns["messages"])
    openings = env.openings(columns)
    del columns["messages"]
    prompt_id, ground_truth = str(columns.pop("prompt_id", row)), columns.pop("ground_truth", None)
    prompt_id = f"{special.part}/{prompt_id}" if special.part else prompt_id
    special = replace(special, part=pool) if pool else special
    alone = SampleState(prompt_id, index, openings.get("", []), ground_truth, columns, special=special)
    if not any(openings):
        return [alone]
    episode = EpisodeState(task, derive_seed(seed, step, prompt_id, index))
    for role, messages in openings.items():
        episode.seat(role, messages, like=alone)
    return [episode.seats[role] for role in env.policy_roles]


def check_turns(env: BaseMDPEnv, sample: SampleState) -> None:
    """Fail a sample if a turn was rewarded that the policy did not take."""
    rewarded = sample.turn_rewards and max(sample.turn_rewards) >= sample.num_turns
    if sample.failure is None and rewarded:
        what = f"{type(env).__name__} rewarded a turn that the policy did not take"
        sample.fail(what, "env/contract")


def check_failures(episodes: Sequence[Episode], max_failed_share: float) -> None:
    """Raise TooManyFailuresError, with the three most frequent causes, if more than the allowed share failed."""
    failed = [episode for episode in episodes if _failed(episode)]
    causes = Counter(_cause(episode[0]) for episode in failed)
    examples = {_cause(episode[0]): episode[0].failure for episode in reversed(failed)}
    if causes.total() > max_failed_share * len(episodes):
        most = "; ".join(f"{count} x {cause}: {examples[cause]}" for cause, count in causes.most_common(3))
        raise TooManyFailuresError(
            f"{causes.total()} of {len(episodes)} episodes failed, more than rollout.max_failed_share="
            f"{max_failed_share:g} allows. Most frequent: {most}.",
            [sample for episode in failed for sample in episode],
        )


def _cause(sample: SampleState) -> str:
    part = sample.special.part
    return f"{part}: {sample.failure_class}" if part else sample.failure_class


def _failed(episode: Episode) -> bool:
    return any(sample.failure is not None for sample in episode)
