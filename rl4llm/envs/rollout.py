"""From prompts to groups of scored trajectories: one call plays all episodes of a rollout."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import BaseMDPEnv, EnvState, EpisodeState, SampleState, messages_of
from rl4llm.core.errors import EnvError, RL4LLMError, TooManyFailuresError
from rl4llm.core.seeds import derive_seed
from rl4llm.core.types import ChatMessage, Group, SamplingParams, TokenSpan, Trajectory, count_turns
from rl4llm.data.render import Renderer
from rl4llm.envs.policy import PolicyLLM
from rl4llm.rewards.score import score

GREEDY = {"temperature": 0.0}


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What was played: groups of scored trajectories, and the samples that failed through no fault of the model."""

    groups: tuple[Group, ...]
    failed: tuple[SampleState, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which row of a dataset is played, as which of its samples, and how that one is sampled."""

    row: int
    index: int
    sampling: Mapping[str, float]
    is_baseline: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """Episodes of one environment that are to be played, or were: a list of samples for each attempt, one for each role.

    Those of a prompt stand together, `size` of them.
    """

    rollout: Rollout
    attempts: list[Attempt]
    episodes: list[list[SampleState]]
    size: int
    step: int
    sampling_params: SamplingParams

    @property
    def samples(self) -> list[SampleState]:
        return [seat for seats in self.episodes for seat in seats]

    def only(self, numbers: Sequence[int]) -> Round:
        """Some of the episodes, from their beginning."""
        attempts = [self.attempts[number] for number in numbers]
        return replace(self, attempts=attempts, episodes=[self.rollout.seats(attempt, self.step) for attempt in attempts])


class Rollout:
    """Plays the episodes of an environment against an engine.

    An episode has a sample for each role that the policy plays. One that failed is played once more from its seed, and
    the others with it; what fails again, or is not scored, is left out and counted, and when more than `max_failed_share` of
    a rollout fails, TooManyFailuresError names the three most frequent causes.

    Where several environments are played together, each has a name, its `part`, which begins the ids of its prompts, and
    `sampling`, fields of SamplingParams that are its own.
    """

    def __init__(
        self,
        env: BaseMDPEnv,
        client: BaseClient,
        renderer: Renderer,
        runner: asyncio.Runner,
        *,
        seed: int,
        max_failed_share: float = 0.1,
        part: str = "",
        sampling: Mapping[str, Any] | None = None,
    ):
        self.env = env
        self.part = part
        self.runner = runner
        self.max_failed_share = max_failed_share
        self._client = client
        self._renderer = renderer
        self._seed = seed
        self._sampling = dict(sampling or {})

    @property
    def num_rows(self) -> int:
        """Of the dataset."""
        return len(self.env.dataset)

    @property
    def group_size(self) -> int:
        """Attempts per prompt."""
        return self.env.group_size

    @property
    def tokenizer(self) -> Any:
        """The policy's."""
        return self.env.tokenizer

    def count_groups(self, rows: Sequence[int]) -> int:
        """How many groups the episodes of `rows` make from which the policy learns."""
        return len(rows) * len(self.env.trained_roles)

    def close(self) -> None:
        """Release the environment."""
        self.env.close()

    def play(self, rows: Sequence[int], **how: Any) -> RolloutResult:
        """Play and score episodes of some of the dataset's rows; how many, and which, see `begin`."""
        return play_together([self.begin(rows, **how)])

    def begin(
        self,
        rows: Sequence[int],
        *,
        step: int,
        sampling_params: SamplingParams,
        group_size: int | None = None,
        first_index: int = 0,
        sampling: Sequence[Mapping[str, float]] = (),
        greedy_baseline: bool = False,
        earlier: Mapping[int, int] | None = None,
    ) -> Round:
        """`group_size` episodes for each of the dataset's `rows`, of which none has begun.

        `first_index` is that of the first sample of each row; another one gives other draws of the same prompt. `sampling`
        holds fields of SamplingParams by sample, from the start again after the last. With a `greedy_baseline` each row is
        played once more at temperature 0, as the baseline of its group. `earlier` says how often a row was played before in
        this step, or is on other ranks; its samples here are further ones then.
        """
        size = group_size or self.env.group_size
        seen = Counter({row: count * (size + greedy_baseline) for row, count in (earlier or {}).items()})
        attempts = list(self._attempts(rows, size, first_index, seen, sampling, greedy_baseline))
        episodes = [self.seats(attempt, step) for attempt in attempts]
        params = sampling_params.replace(**self._sampling)
        return Round(self, attempts, episodes, size + greedy_baseline, step, params)

    def llm(self, played: Round) -> PolicyLLM:
        """The policy, for the samples of a round."""
        llm = PolicyLLM(self._client, self._renderer, self.runner, seed=self._seed, step=played.step)
        llm.begin(played.samples)
        return llm

    def scored(self, played: Round) -> RolloutResult:
        """The groups of a round that was played, with the rewards of this environment."""
        samples = [seat for seat in played.samples if seat.failure is not None or seat.policy_spans]
        scores = score(samples, self.env.reward_functions, self.env.reward_transform_fn)
        for sample in samples:
            self._check_turns(sample)
        earned = {name: values.tolist() for name, values in scores.rewards.items()}
        trajectories = {
            id(sample): self._trajectory(sample, {name: values[i] for name, values in earned.items()}, reward)
            for i, (sample, reward) in enumerate(zip(samples, scores.reward.tolist(), strict=True))
            if sample.failure is None
        }
        return RolloutResult(
            groups=tuple(self._groups(played.episodes, trajectories, played.size)),
            failed=tuple(sample for sample in samples if sample.failure is not None),
        )

    @staticmethod
    def _attempts(
        rows: Sequence[int],
        size: int,
        first: int,
        seen: Counter[int],
        sampling: Sequence[Mapping[str, float]],
        greedy_baseline: bool,
    ) -> Iterator[Attempt]:
        """Every attempt. `seen` counts those that other ranks make of a row, and grows, so that no two are alike."""
        for row in rows:
            begin = first + seen[row]
            for index in range(size):
                yield Attempt(row, begin + index, sampling[index % len(sampling)] if sampling else {})
            if greedy_baseline:
                yield Attempt(row, begin + size, GREEDY, is_baseline=True)
            seen[row] += size + greedy_baseline

    def seats(self, attempt: Attempt, step: int) -> list[SampleState]:
        """The samples of one episode, one for each role that the policy plays."""
        columns = dict(self.env.dataset[attempt.row])
        columns["messages"] = task = messages_of(columns["messages"])
        openings = self.env.openings(columns)
        del columns["messages"]
        prompt_id, ground_truth = str(columns.pop("prompt_id", attempt.row)), columns.pop("ground_truth")
        prompt_id = f"{self.part}/{prompt_id}" if self.part else prompt_id
        episode = None
        if any(openings):
            episode = EpisodeState(task, derive_seed(self._seed, step, prompt_id, attempt.index))

        def seat(role: str, messages: list[ChatMessage]) -> SampleState:
            shared = {} if episode is None else {"role": role, "transcript": episode.said}
            return SampleState(
                prompt_id,
                attempt.index,
                messages,
                ground_truth,
                columns | shared,
                sampling=attempt.sampling,
                is_baseline=attempt.is_baseline,
                role=role,
                part=self.part,
                episode=episode,
            )

        seats = {role: seat(role, messages) for role, messages in openings.items()}
        if episode is not None:
            episode.seats |= seats
        return [seats[role] for role in self.env.policy_roles]

    def check_played(self, seats: list[SampleState]) -> None:
        if not _failed(seats) and not any(seat.policy_spans for seat in seats):
            said = any(message.role == "assistant" for seat in seats for message in seat.messages[seat.init_msg_size :])
            nothing = "ended the episode before the policy said anything"
            other = "ended the episode with no assistant message that is the text that was sampled; append it unchanged"
            seats[0].fail(f"{type(self.env).__name__} {other if said else nothing}", "env/contract")
        for seat in seats:
            self._check_turns(seat)
            if not seat.done:  # a level-3 loop that did not say why it stopped
                seat.finish("done")

    def _check_turns(self, sample: SampleState) -> None:
        if sample.failure is None and sample.turn_rewards and max(sample.turn_rewards) >= count_turns(sample.spans):
            rewarded = "a turn that the policy did not take was rewarded"
            sample.fail(f"{type(self.env).__name__}: {rewarded}", "env/contract")

    def _trajectory(self, sample: SampleState, rewards: dict[str, float], reward: float) -> Trajectory:
        turns = range(count_turns(sample.spans)) if sample.turn_rewards else ()
        turn_rewards = tuple(sample.turn_rewards.get(turn, 0.0) for turn in turns)
        return Trajectory(
            prompt_id=sample.prompt_id,
            spans=_to_last_word(sample.spans),
            messages=tuple(sample.messages),
            rewards=rewards,
            reward=reward + sum(turn_rewards),
            stop_reason=sample.stop_reason or "done",
            extras={"sample": sample.index, "ground_truth": sample.ground_truth, **sample.extras},
            turn_rewards=turn_rewards,
            forks=tuple(_to_last_word(record) for record in sample.forks),
            role=sample.role,
            part=sample.part,
        )

    def _groups(
        self, episodes: list[list[SampleState]], trajectories: dict[int, Trajectory], size: int
    ) -> Iterator[Group]:
        """Each draw of a prompt is a group of its own for each role, whatever else a rank plays."""
        for first in range(0, len(episodes), size):
            for seats in zip(*episodes[first : first + size], strict=True):  # those of one role
                played = [seat for seat in seats if id(seat) in trajectories]
                members = [trajectories[id(seat)] for seat in played if not seat.is_baseline]
                baseline = next((trajectories[id(seat)] for seat in played if seat.is_baseline), None)
                if members:
                    if members[0].role or any(seat.own_prompt for seat in played):
                        members = list(_from_common_start(members))
                    frozen = members[0].role in self.env.frozen
                    yield Group(members[0].prompt_id, tuple(members), baseline, frozen)


def play_together(rounds: Sequence[Round]) -> RolloutResult:
    """Play and score the episodes of several environments, all at once."""
    rounds = [played for played in rounds if played.episodes]  # the share of a rank may be empty
    if not rounds:
        return RolloutResult((), ())
    _play(rounds)
    _play_failed_again(rounds)
    results = [played.rollout.scored(played) for played in rounds]
    _check_failures(rounds, max(played.rollout.max_failed_share for played in rounds))
    return RolloutResult(
        groups=tuple(group for result in results for group in result.groups),
        failed=tuple(sample for result in results for sample in result.failed),
    )


def _play(rounds: Sequence[Round]) -> None:
    """One event loop plays all environments but those with a loop of their own, which take their turn after it."""
    llms = [played.rollout.llm(played) for played in rounds]
    states = [EnvState(played.samples, played.step) for played in rounds]
    together = [i for i, played in enumerate(rounds) if _plays_by_default(played.rollout.env)]
    try:
        if len(together) > 1:
            rounds[0].rollout.runner.run(_run_all([(rounds[i], states[i], llms[i]) for i in together]))
        for i, played in enumerate(rounds):
            if len(together) < 2 or i not in together:
                _run_alone(played, states[i], llms[i])
    finally:
        for llm in llms:
            llm.end()
    for played in rounds:
        for seats in played.episodes:
            played.rollout.check_played(seats)


def _plays_by_default(env: BaseMDPEnv) -> bool:
    return type(env)._run_interaction_loop is BaseMDPEnv._run_interaction_loop


def _run_alone(played: Round, state: EnvState, llm: PolicyLLM) -> None:
    with _naming(played.rollout.env):
        played.rollout.env._run_interaction_loop(state, llm, played.sampling_params)


async def _run_all(playing: Sequence[tuple[Round, EnvState, PolicyLLM]]) -> None:
    """All episodes of all environments, each of which is announced to the engine before the first begins."""
    for played, state, llm in playing:
        await played.rollout.env._open_episodes(state, llm)
    try:
        async with asyncio.TaskGroup() as environments:
            for each in playing:
                environments.create_task(_run_one(*each))
    except BaseExceptionGroup as failures:  # the group cancelled the other environments; the first cause says it all
        raise failures.exceptions[0] from None


async def _run_one(played: Round, state: EnvState, llm: PolicyLLM) -> None:
    env = played.rollout.env
    with _naming(env):
        await env._run_episodes(state, llm, env.turn_params(played.sampling_params))


@contextmanager
def _naming(env: BaseMDPEnv) -> Iterator[None]:
    """An error of the environment's own loop names the environment."""
    try:
        yield
    except RL4LLMError:
        raise
    except Exception as error:
        where = f"{type(env).__name__}._run_interaction_loop"
        raise EnvError(f"{where} raised {type(error).__name__}: {error}") from error


def _play_failed_again(rounds: Sequence[Round]) -> None:
    """Play each episode that failed once more, from its seed, in its place."""
    failed = [[i for i, seats in enumerate(played.episodes) if _failed(seats)] for played in rounds]
    again = [played.only(numbers) for played, numbers in zip(rounds, failed, strict=True)]
    for played, numbers, fresh in zip(rounds, failed, again, strict=True):
        for i, seats in zip(numbers, fresh.episodes, strict=True):
            first_failure = played.episodes[i][0].failure_class
            played.episodes[i] = seats
            for seat in seats:
                seat.extras["played_again_after"] = first_failure
    if any(failed):
        _play([fresh for fresh in again if fresh.episodes])


def _check_failures(rounds: Sequence[Round], max_failed_share: float) -> None:
    episodes = [seats for played in rounds for seats in played.episodes]
    failed = [seats for seats in episodes if _failed(seats)]
    causes = Counter(_cause(seats[0]) for seats in failed)
    examples = {_cause(seats[0]): seats[0].failure for seats in reversed(failed)}
    if causes.total() > max_failed_share * len(episodes):
        most = "; ".join(f"{count} x {cause}: {examples[cause]}" for cause, count in causes.most_common(3))
        raise TooManyFailuresError(
            f"{causes.total()} of {len(episodes)} episodes failed, more than rollout.max_failed_share="
            f"{max_failed_share:g} allows. Most frequent: {most}.",
            [seat for seats in failed for seat in seats],
        )


def _cause(sample: SampleState) -> str:
    return f"{sample.part}: {sample.failure_class}" if sample.part else sample.failure_class


def _failed(seats: Sequence[SampleState]) -> bool:
    return any(seat.failure is not None for seat in seats)


def _from_common_start(trajectories: Sequence[Trajectory]) -> Iterator[Trajectory]:
    """The trajectories with the tokens that all begin with as their first span: who is not the first to speak in an episode
    begins with what others said in it, and an agent with whatever it writes."""
    firsts = [trajectory.spans[0].token_ids for trajectory in trajectories]
    if len(set(firsts)) == 1:
        yield from trajectories
        return
    shared = next(i for i, tokens in enumerate(zip_longest(*firsts)) if len(set(tokens)) > 1)
    for trajectory, first in zip(trajectories, firsts, strict=True):
        rest = filter(None, [first[shared:]])
        spans = (TokenSpan.context(first[:shared]), *map(TokenSpan.context, rest), *trajectory.spans[1:])
        yield replace(trajectory, spans=spans)


def _to_last_word(spans: Sequence[TokenSpan]) -> tuple[TokenSpan, ...]:
    """What came after the policy's last word trains nothing."""
    last = max(i for i, span in enumerate(spans) if span.author == "policy")
    return tuple(spans[: last + 1])
