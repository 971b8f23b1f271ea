"""The contract of inference engines: token ids in, exactly what was sampled out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rl4llm.core.types import Completion, SamplingParams, WeightRef


class BaseClient(ABC):
    """One inference engine, in process or behind a network.

    A *session* names one conversation (for example "12/gsm8k-17/3"). An engine may keep its cache between the turns of a
    session until `release`; results never depend on it. Log-probs follow the convention of `Completion`.
    """

    context_length: int
    vocab_size: int
    in_process: ClassVar[bool] = False  # True: each rank has an engine of its own, else all speak with the same
    publishers: tuple[str, ...] = ("filesystem",)  # sync.name may be; the first where the user leaves it open

    def __str__(self) -> str:
        """What messages call it."""
        return type(self).__name__

    @abstractmethod
    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: SamplingParams, *, session: str = ""
    ) -> Completion:
        """Sample one completion of `prompt_ids`.

        Raises EngineError for an empty prompt, ids outside the vocabulary, or a prompt that leaves no room in the context.
        """

    @abstractmethod
    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs that the engine gives to each token after the first, at temperature 1; the canary's question."""

    @abstractmethod
    async def load(self, weight_ref: WeightRef) -> None:
        """Take over the weights that `weight_ref` names; afterwards `version` reports its version."""

    @abstractmethod
    async def version(self) -> int:
        """The version of the weights that the engine holds; -1 before the first load."""

    def report_to(self, warn: Callable[[str], None]) -> None:
        """Where to send lines that the user should see, such as that a server is gone."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the logs, counted since the start."""
        return {}

    def engines(self) -> Sequence[BaseClient]:
        """Every engine behind this client, for the canary to question each; a single one is its own."""
        return (self,)

    async def release(self, session: str) -> None:
        """The conversation is over; its cache may go."""

    async def expect(self, session: str) -> None:
        """The conversation begins; an engine in deterministic mode waits for all conversations under way."""

    async def park(self, session: str) -> None:
        """The conversation waits for another one; its cache may stay, and nobody waits for it until `expect`."""

    async def pause(self) -> None:
        """Stop generating at the next token; requests wait."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Give device memory back."""

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take device memory again."""

    async def health(self) -> dict[str, Any]:
        """What the engine says about itself; raises EngineError when it cannot serve."""
        return {"version": await self.version()}

    async def disconnect(self) -> None:
        """Close what belongs to the running event loop; the next request opens it again."""

    async def close(self) -> None:
        """Release everything."""

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling_params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """The synchronous form, for scripts: one completion per prompt, in order. Not for use inside an event loop."""

        async def all_of_them() -> list[Completion]:
            pairs = zip(prompts, sampling_params, strict=True)
            try:
                return await asyncio.gather(*(self.generate(prompt, params) for prompt, params in pairs))
            finally:
                await self.disconnect()

        return asyncio.run(all_of_them())
