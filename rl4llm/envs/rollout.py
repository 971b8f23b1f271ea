"""Play prompts to groups of scored trajectories."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import EnvError, RL4LLMError, TooManyFailuresError
from rl4llm.core.sample import EnvState, SampleState, Special, group_of, trajectory_of
from rl4llm.core.types import Group, SamplingParams, Trajectory
from rl4llm.data.render import Renderer
from rl4llm.data.thoughts import kept_thoughts
from rl4llm.envs.compaction import CompactingLLM
from rl4llm.envs.policy import PolicyLLM
from rl4llm.rewards.scoring import combine, earn, successes
from rl4llm.runtime.raised import raised
from rl4llm.runtime.runner import Runner
from rl4llm.runtime.threads import OneThread, in_own_thread, result_of

T = TypeVar("T")
Episode = list[SampleState]
"""A sample for each role that the policy plays: one unless the environment has several roles."""


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """Groups of scored trajectories, and the samples that failed for reasons other than the policy."""

    groups: tuple[Group, ...]
    failed: tuple[SampleState, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


class Rollout:
    """Play the episodes of an environment with an engine.

        rollout = Rollout(env, client)
        groups = rollout.play([0, 1, 2], step=0, sampling_params=SamplingParams(max_tokens=8)).groups

    A failed episode is played once more from its seed. If it fails again, or cannot be scored, it is left out and counted.
    If more than `max_failed_share` of a rollout fails, TooManyFailuresError lists the three most frequent causes.

    Args:
        env: the environment, with its prompts, tokenizer and rewards.
        client: the engine.
        renderer: turns messages into tokens; by default with the chat template of the environment's tokenizer.
        runner: runs the engine's event loop, for callers that share one; by default a new one that `close` closes.
        seed: seed of all randomness in episodes; by default the environment's.
        max_failed_share: share of the episodes that may fail, from 0 to 1.
        part: the environment's name in a mixture, which prefixes the ids of its prompts.
        sampling: fields of SamplingParams for this environment.
    """

    def __init__(
        self,
        env: BaseMDPEnv,
        client: BaseClient,
        renderer: Renderer | None = None,
        runner: Runner | None = None,
        *,
        seed: int | None = None,
        max_failed_share: float = 0.1,
        part: str = "",
        sampling: Mapping[str, Any] | None = None,
    ):
        self.env = env
        self.part = part
        self.runner = runner or Runner()
        self.max_failed_share = max_failed_share
        self._playing: list[Episodes] = []
        self._unscored: list[Episodes] = []  # played, while others are scored
        self._scoring = asyncio.Lock()
        self._loops: OneThread | None = None  # for interaction loops of users, which are not asynchronous
        self._owns_runner = runner is None
        self._client = client
        self._renderer = renderer or Renderer.of(env, env.tokenizer)
        self._seed = env.seed if seed is None else seed
        self._sampling = dict(sampling or {})

    @property
    def num_rows(self) -> int:
        return len(self.env.dataset)

    @property
    def playing(self) -> list[SampleState]:
        """Return the samples that `play` plays now, for whoever shows progress."""
        return [sample for unit in self._playing for sample in unit.samples]

    @property
    def group_size(self) -> int:
        """Return the number of samples per prompt."""
        return self.env.group_size

    @property
    def tokenizer(self) -> Any:
        """Return the policy's tokenizer."""
        return self.env.tokenizer

    @property
    def plays_whole(self) -> bool:
        """Return whether all episodes of a call of `begin` are one unit, for an interaction loop of a user."""
        return type(self.env)._run_interaction_loop is not BaseMDPEnv._run_interaction_loop

    def count_groups(self, rows: Sequence[int]) -> int:
        """Return the number of groups that the policy learns from in the episodes of `rows`."""
        return len(rows) * len(self.env.trained_roles)

    def play(self, rows: Sequence[int], **how: Any) -> RolloutResult:
        """Play and score episodes of some of the dataset's rows; `begin` explains the arguments."""
        self._playing = self.begin(rows, **how)
        try:
            self.runner.run(play_together(self._playing))
            return self.finish(self._playing)
        finally:
            self._playing = []

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
    ) -> list[Episodes]:
        """Return `group_size` new episodes for each of the dataset's `rows`: a unit for each row, one for all rows if the
        environment has its own interaction loop.

        Seeds derive from `step` and the index of the sample. `first_index` is the index of each row's first sample; another
        index gives other draws of the same prompt.
        `sampling` has fields of SamplingParams by sample and repeats after the last. With `greedy_baseline` each row is
        played once more at temperature 0, as the baseline of its group. `earlier` counts how often a row was already played
        in this step, here or on other ranks, so that its samples get further indices.
        """
        size = group_size or self.env.group_size
        ladder = sampling or ({},)
        kinds = [Special(part=self.part, sampling=ladder[index % len(ladder)]) for index in range(size)]
        if greedy_baseline:
            kinds.append(Special(part=self.part, sampling={"temperature": 0.0}, is_baseline=True))
        begin = []
        seen = Counter({row: count * len(kinds) for row, count in (earlier or {}).items()})
        for row in rows:  # a row may come twice; its samples must differ
            for index, special in enumerate(kinds, first_index + seen[row]):
                begin.append(partial(self.env.begin_episode, row, index, special, self._seed, step))
            seen[row] += len(kinds)
        params, at_once = sampling_params.replace(**self._sampling), len(kinds)
        if self.plays_whole:
            at_once = max(len(begin), 1)
        return [
            Episodes(self, begin[start : start + at_once], len(kinds), step, params)
            for start in range(0, len(begin), at_once)
        ]

    def policy(self, state: EnvState) -> PolicyLLM:
        """Return the policy for some episodes, which it ends with `end`."""
        make: Callable[..., PolicyLLM] = PolicyLLM
        if (at := self.env.compact_at) is not None:
            make = partial(CompactingLLM, at=at, may_cut=self.env.continue_truncated)
        llm = make(self._client, self._renderer, self.runner, seed=self._seed, step=state.step)
        llm.begin(state.sample_states)
        return llm

    async def in_loop_thread(self, loop: Callable[[], EnvState]) -> None:
        """Run an interaction loop of a user in the thread that all of them share."""
        self._loops = self._loops or OneThread("rl4llm-env")
        await result_of(self._loops.put(loop))

    async def score(self, unit: Episodes) -> None:
        """Run the rewards over a unit that has been played, in a separate thread, while others play.

        Units that end meanwhile are the next batch. `finish` runs rewards without a time limit, in the caller's thread.
        """
        if any(reward.score_timeout_s is None for reward in self.env.reward_functions):
            return
        self._unscored.append(unit)
        async with self._scoring:
            units, self._unscored = self._unscored, []
            if units:
                await in_own_thread("rl4llm-rewards", partial(self._earn, units))

    def finish(self, played: Sequence[Episodes]) -> RolloutResult:
        """Return the groups of played episodes; raise TooManyFailuresError if too many of them failed."""
        result = self.scored(played)
        check_failures([episode for unit in played for episode in unit.all], self.max_failed_share)
        return result

    def scored(self, played: Sequence[Episodes]) -> RolloutResult:
        """Return the groups of played episodes, scored with the rewards of this environment."""
        self._earn(played)
        samples = _attempts(played)
        scores = combine(samples, self.env.reward_functions, self.env.reward_transform_fn)
        for sample in samples:
            check_turns(self.env, sample)
            if counts := self._counts(sample):
                sample.extras["metrics"] = {**sample.extras.get("metrics", {}), **counts}
        earned = {name: values.tolist() for name, values in scores.rewards.items()}
        trajectories = {
            id(sample): trajectory_of(sample, {name: values[i] for name, values in earned.items()}, reward)
            for i, (sample, reward) in enumerate(zip(samples, scores.reward.tolist(), strict=True))
            if sample.failure is None
        }
        for key, trajectory in trajectories.items():
            won = successes(
                self.env.reward_functions,
                trajectory.rewards,
                reward=trajectory.reward,
                success_at=self.env.success_at,
            )
            trajectories[key] = replace(trajectory, successes=won)
        groups = [
            group_of(of_role, trajectories, frozen=of_role[0].role in self.env.frozen)
            for unit in played
            for of_role in unit.by_role()
        ]
        return RolloutResult(
            groups=tuple(filter(None, groups)),
            failed=tuple(sample for sample in samples if sample.failure is not None),
        )

    def _earn(self, played: Sequence[Episodes]) -> None:
        earn([sample for sample in _attempts(played) if sample.rewards is None], self.env.reward_functions)

    def _counts(self, sample: SampleState) -> dict[str, int]:
        """Count special tokens in the text of others, compactions, and thoughts that the template would have dropped."""
        context = [message for message in sample.messages if message.role != "assistant"]
        renderer = self._renderer.of_row(sample.columns)
        special = sample.special
        compactions = sum(origin is not None and origin.relation == "continues" for origin in special.origins)
        counts = {"special_tokens": renderer.special_tokens(context), "compactions": compactions}
        if sample.failure is None and not special.own_prompt and not special.forks:
            counts["kept_thoughts"] = kept_thoughts(renderer, sample.spans, sample.messages)
        return {name: count for name, count in counts.items() if count}

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's event loop, such as a request to the engine."""
        return self.runner.run(coroutine)

    def close(self) -> None:
        """Release the environment."""
        self.env.close()
        if self._loops is not None:
            self._loops.end()
        if self._owns_runner:
            self.runner.close()


def _attempts(played: Sequence[Episodes]) -> list[SampleState]:
    """Return the samples of played episodes, except those of roles that never spoke."""
    return [
        sample
        for unit in played
        for sample in unit.samples
        if sample.failure is not None or sample.policy_spans
    ]


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
        for start in range(0, len(self.all), self.size):
            yield from zip(*self.all[start : start + self.size], strict=True)

    async def announce(self) -> None:
        """Announce all episodes to the engine, which may wait for them from now on."""
        state = EnvState(self.samples, self.step)
        self._llm = self.rollout.policy(state)
        if not self.rollout.plays_whole:
            for sample in state.episodes:
                await self._llm.open(sample)

    async def play(self) -> None:
        """Play all announced episodes, then once more those that failed, from their seed, and score them."""
        rollout, env, llm = self.rollout, self.rollout.env, self._llm
        episodes = self.all
        while episodes:
            state = EnvState([sample for episode in episodes for sample in episode], self.step)
            llm = llm or rollout.policy(state)
            try:
                if rollout.plays_whole:
                    loop = partial(env._run_interaction_loop, state, llm, self.sampling_params)
                    await rollout.in_loop_thread(loop)
                else:
                    await env._run_episodes(state, llm, env.turn_params(self.sampling_params))
            except RL4LLMError:
                raise
            except Exception as error:
                raise EnvError(raised(f"{type(env).__name__}._run_interaction_loop", error)) from error
            finally:
                await llm.end()
            for episode in episodes:
                _finish(env, episode)
            episodes, llm = self._restart(), None
        await rollout.score(self)
        self.outcome.set_result(None)

    def _restart(self) -> list[Episode]:
        """Return new episodes in place of those that failed for the first time."""
        again = []
        for number, episode in enumerate(self.all):
            if _failed(episode) and "played_again_after" not in episode[0].extras:
                self.all[number] = self.begin[number]()
                again.append(self.all[number])
                for sample in again[-1]:
                    sample.extras["played_again_after"] = episode[0].failure_class
        return again


async def play_together(units: Sequence[Episodes]) -> None:
    """Play all episodes at once, after announcing all of them to the engine; interaction loops of users follow one by one.

    The first error ends all of them, and is that of each unit that has not been played.
    """
    units = [unit for unit in units if not unit.outcome.done()]  # a checkpoint may have brought the others
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


def _finish(env: BaseMDPEnv, episode: Episode) -> None:
    """Finish an episode that has been played, or fail it if the environment broke its contract."""
    if not _failed(episode) and not any(sample.policy_spans for sample in episode):
        new = (message for sample in episode for message in sample.messages[sample.init_msg_size :])
        problem = "before the policy took a turn"
        if any(message.role == "assistant" for message in new):
            problem = "without the sampled text as an assistant message; append it unchanged"
        episode[0].fail(f"{type(env).__name__} ended the episode {problem}", "env/contract")
    for sample in episode:
        check_turns(env, sample)
        sample.finish("done")  # unless it has another reason; a level-3 loop may give none


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
