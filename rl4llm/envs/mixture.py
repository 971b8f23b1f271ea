"""Play several environments in one rollout (environment mixture)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.sample import EnvState
from rl4llm.core.types import SamplingParams
from rl4llm.envs.policy import PolicyLLM
from rl4llm.envs.rollout import Episodes, Rollout, RolloutResult, check_failures, naming


class MixedRollout:
    """Play the episodes of several environments at once, each with its own rewards, tools and sampling.

    The rows of all datasets are numbered consecutively. Failures are counted under the name of their environment.

    Args:
        parts: the rollouts of the environments; `part` is the name of each.
    """

    def __init__(self, parts: Sequence[Rollout]):
        self.parts = list(parts)
        self._ends = list(accumulate(part.num_rows for part in self.parts))

    @property
    def num_rows(self) -> int:
        """Return the number of rows of all datasets together."""
        return self._ends[-1]

    @property
    def group_size(self) -> int:
        """Return the number of samples per prompt."""
        return self.parts[0].group_size

    @property
    def tokenizer(self) -> Any:
        """Return the policy's tokenizer."""
        return self.parts[0].tokenizer

    def count_groups(self, rows: Sequence[int]) -> int:
        """Return the number of groups that the policy learns from in the episodes of `rows`."""
        return sum(part.count_groups(own) for part, own in zip(self.parts, self._by_part(rows), strict=True))

    def play(
        self, rows: Sequence[int], *, earlier: Mapping[int, int] | None = None, **how: Any
    ) -> RolloutResult:
        """Play and score episodes of some rows; `Rollout.begin` explains the arguments."""
        counts = [Counter(own) for own in self._by_part(list(Counter(earlier or {}).elements()))]
        shares = zip(self.parts, self._by_part(rows), counts, strict=True)
        begun = [part.begin(own, earlier=before, **how) for part, own, before in shares]
        tries = [episodes.tries() for episodes in begun]
        while any(states := [next(each, None) for each in tries]):
            self._play(begun, states)
        results = [part.scored(episodes) for part, episodes in zip(self.parts, begun, strict=True)]
        episodes = [episode for each in begun for episode in each.all]
        check_failures(episodes, max(part.max_failed_share for part in self.parts))
        return RolloutResult(
            groups=tuple(group for result in results for group in result.groups),
            failed=tuple(sample for result in results for sample in result.failed),
        )

    def _play(self, begun: Sequence[Episodes], states: Sequence[EnvState | None]) -> None:
        """Play all environments in one event loop, then one by one those with a custom interaction loop."""
        with ExitStack() as over:
            playing = [
                (part.env, state, over.enter_context(part.policy(state)), episodes.sampling_params)
                for part, episodes, state in zip(self.parts, begun, states, strict=True)
                if state is not None
            ]
            self.parts[0].run(_play_at_once([each for each in playing if _plays_by_default(each[0])]))
            for env, state, llm, params in playing:
                if not _plays_by_default(env):
                    with naming(env):
                        env._run_interaction_loop(state, llm, params)

    def close(self) -> None:
        """Release the environments."""
        for part in self.parts:
            part.close()

    def _by_part(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the rows of each part, as its dataset numbers them."""
        starts = [0, *self._ends[:-1]]
        return [
            [row - start for row in rows if start <= row < end]
            for start, end in zip(starts, self._ends, strict=True)
        ]


async def _play_at_once(playing: Sequence[tuple[BaseMDPEnv, EnvState, PolicyLLM, SamplingParams]]) -> None:
    """Play all episodes of all environments, after announcing all of them to the engine."""

    async def play(env: BaseMDPEnv, state: EnvState, llm: PolicyLLM, params: SamplingParams) -> None:
        with naming(env):
            await env._run_episodes(state, llm, env.turn_params(params))

    for _, state, llm, _ in playing:
        for sample in state.episodes:
            await llm.open(sample)
    try:
        async with asyncio.TaskGroup() as environments:
            for each in playing:
                environments.create_task(play(*each))
    except BaseExceptionGroup as failures:  # the group cancelled the others; the first cause explains all
        raise failures.exceptions[0] from None


def _plays_by_default(env: BaseMDPEnv) -> bool:
    return type(env)._run_interaction_loop is BaseMDPEnv._run_interaction_loop
