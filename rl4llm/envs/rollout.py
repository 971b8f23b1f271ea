"""Play prompts to groups of scored trajectories."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import EnvError, RL4LLMError
from rl4llm.core.sample import EnvState, SampleState, Special, group_of, trajectory_of
from rl4llm.core.types import Group, SamplingParams, Trajectory
from rl4llm.data.render import Renderer
from rl4llm.data.thoughts import kept_thoughts
from rl4llm.envs.policy import PolicyLLM
from rl4llm.envs.stream import Episodes, begin_episode, check_failures, check_turns, play_together
from rl4llm.rewards.scoring import combine, earn, successes
from rl4llm.runtime.raised import raised
from rl4llm.runtime.runner import Runner
from rl4llm.runtime.threads import OneThread, in_own_thread, result_of

T = TypeVar("T")
logger = logging.getLogger("rl4llm.envs")


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
        self._warned = False

    @property
    def num_rows(self) -> int:
        """Return the number of rows in the dataset."""
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
                begin.append(
                    partial(begin_episode, self.env, row, index, special, seed=self._seed, step=step)
                )
            seen[row] += len(kinds)
        params, at_once = sampling_params.replace(**self._sampling), len(kinds)
        if self.plays_whole:
            at_once = max(len(begin), 1)
        return [
            Episodes(self, begin[first : first + at_once], len(kinds), step, params)
            for first in range(0, len(begin), at_once)
        ]

    def policy(self, state: EnvState) -> PolicyLLM:
        """Return the policy for some episodes, which it ends with `end`."""
        llm = PolicyLLM(self._client, self._renderer, self.runner, seed=self._seed, step=state.step)
        llm.begin(state.sample_states)
        return llm

    async def interact(self, state: EnvState, llm: PolicyLLM, sampling_params: SamplingParams) -> None:
        """Play episodes with the environment's interaction loop; a loop of a user runs in a separate thread."""
        env = self.env
        with naming(env):
            if self.plays_whole:
                self._loops = self._loops or OneThread("rl4llm-env")
                loop = partial(env._run_interaction_loop, state, llm, sampling_params)
                await result_of(self._loops.put(loop))
            else:
                await env._run_episodes(state, llm, env.turn_params(sampling_params))

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
        self._warn_of_no_reward(samples)
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
        for name, trajectory in trajectories.items():
            won = successes(
                self.env.reward_functions,
                trajectory.rewards,
                reward=trajectory.reward,
                success_at=self.env.success_at,
            )
            trajectories[name] = replace(trajectory, successes=won)
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
        earn([one for one in _attempts(played) if one.rewards is None], self.env.reward_functions)

    def _warn_of_no_reward(self, samples: Sequence[SampleState]) -> None:
        """Log once if no reward is set and the environment rewarded no turn of any sample."""
        if self._warned or self.env.reward_functions or not samples:
            return
        self._warned = not any(sample.turn_rewards for sample in samples)
        if self._warned:
            logger.warning(
                "%s rewarded no turn in %d episodes, and there is no other reward: nothing can be learned from them. "
                "Next: set rewards, or call sample.reward_turn.",
                type(self.env).__name__,
                len(samples),
            )

    def _counts(self, sample: SampleState) -> dict[str, int]:
        """Count the special tokens in the text of others, and tokens of thoughts that the template would have dropped."""
        context = [message for message in sample.messages if message.role != "assistant"]
        renderer = self._renderer.of_row(sample.columns)
        counts = {"special_tokens": renderer.special_tokens(context)}
        if sample.failure is None and not sample.special.own_prompt:
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
    return [one for unit in played for one in unit.samples if one.failure is not None or one.policy_spans]


@contextmanager
def naming(env: BaseMDPEnv) -> Iterator[None]:
    """Name the environment in an error of its interaction loop."""
    try:
        yield
    except RL4LLMError:
        raise
    except Exception as error:
        where = f"{type(env).__name__}._run_interaction_loop"
        raise EnvError(raised(where, error)) from error
