"""The rewards of one environment on a host: score finished episodes in batches of those that are waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from rl4llm.core.base_env import BaseRewardFunction, SampleState
from rl4llm.rewards.ask import SLOW_AFTER_S, Broken, Patience, ask
from rl4llm.runtime.threads import in_own_thread


class Scoring:
    """Calls each reward in one thread at a time, as in a trainer; episodes that end meanwhile are its next batch."""

    def __init__(self, reward_functions: Sequence[BaseRewardFunction]):
        self._queues = [_Queue(reward_function) for reward_function in reward_functions]

    async def score(self, sample: SampleState) -> dict[str, list[float] | Broken]:
        """Return the score of each reward by name, up to the first that fails. Raises RewardError like `ask`."""
        scores: dict[str, list[float] | Broken] = {}
        for queue in self._queues:
            scores[queue.reward_function.name] = value = await queue.score(sample)
            if isinstance(value, Broken):
                break
        return scores


class _Queue:
    def __init__(self, reward_function: BaseRewardFunction):
        self.reward_function = reward_function
        self._waiting: list[tuple[SampleState, asyncio.Future[list[float] | Broken]]] = []
        self._task: asyncio.Task[None] | None = None

    async def score(self, sample: SampleState) -> list[float] | Broken:
        score: asyncio.Future[list[float] | Broken] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, score))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._ask_all())
        return await score

    async def _ask_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            samples = [sample for sample, _ in batch]
            values: Sequence[list[float] | Broken | Exception]
            try:
                values = await in_own_thread("rl4llm-env-score", partial(self._ask, samples))
            except Exception as error:  # noqa: BLE001 - every waiting caller raises it
                values = [error] * len(batch)
            for (_, score), value in zip(batch, values, strict=True):
                if score.done():  # its episode was cancelled
                    continue
                if isinstance(value, Exception):
                    score.set_exception(value)
                else:
                    score.set_result(value)

    def _ask(self, samples: Sequence[SampleState]) -> list[list[float] | Broken]:
        return ask(
            self.reward_function, samples, Patience(SLOW_AFTER_S, self.reward_function.score_timeout_s)
        )
