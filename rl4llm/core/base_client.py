"""The contract of inference engines: token ids in, exactly what was sampled out.

Each class has one purpose, so that code that needs one of them accepts any object with it:

    TakesWeights   loads versions of the weights and reports which one it holds
    LendsDevice    gives its device memory to the trainer and takes it back
    BaseClient     an engine of a run: takes weights, samples, scores tokens, and keeps the caches of conversations
    BasePublisher  brings the weights of the trainer to the engines
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.images import ImagePlace
from rl4llm.core.model_memory import EngineLoad, ModelShape, Precision
from rl4llm.core.types import Completion, SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.runtime.runner import run


class TakesWeights(Protocol):
    """Loads what the trainer publishes."""

    @abstractmethod
    async def load(self, weight_ref: WeightRef) -> None:
        """Load the weights that `weight_ref` names; afterwards `version` returns its version."""

    @abstractmethod
    async def version(self) -> int:
        """Return the version of the weights that the engine holds; -1 before the first load."""


class LendsDevice(Protocol):
    """Shares a device with the trainer."""

    @property
    def awake(self) -> bool:
        """Return whether the engine has all of its device memory and can serve."""

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Release device memory."""

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Allocate the device memory again."""


class BaseClient(TakesWeights, ABC):
    """One inference engine, in this process or behind a network. Log-probs follow the convention of `Completion`.

    A *session* names a conversation, for example "12/gsm8k-17/3". An engine may keep its cache between the turns until
    `release`; results never depend on it.
    """

    context_length: int
    vocab_size: int
    in_process: ClassVar[bool] = False  # True: each rank has its own engine, else all speak with the same
    takes_images: ClassVar[bool] = False  # False: no run with model.vision starts on it
    keeps_features: ClassVar[bool] = (
        False  # whether requests that continue after a load keep the features of their images
    )
    is_server: ClassVar[bool] = False  # True: made once for each address, and used through a fleet
    publishers: tuple[str, ...] = ("filesystem",)  # sync.name may be; the first where the user leaves it open

    @property
    def constrains(self) -> bool:
        """Return whether completions match the grammar of `SamplingParams`, and have it."""
        return False

    @classmethod
    def memory(
        cls, shape: ModelShape, precision: Precision, options: Mapping[str, Any], load: EngineLoad
    ) -> dict[str, int]:
        """Return the bytes that the engine takes on a trainer's device under this load, by purpose, with these options of a
        configuration; nothing if it runs elsewhere."""
        return {}

    @abstractmethod
    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        """Sample one completion of `prompt_ids`; `images` are the places among them that stand for images.

        Raises EngineError for an empty prompt, ids outside the vocabulary, or a prompt that leaves no room in the context.
        """

    @abstractmethod
    async def score(self, token_ids: Sequence[int], images: Sequence[ImagePlace] = ()) -> list[float]:
        """Return the log-prob of each token after the first, at temperature 1; the log-prob parity check uses it.

        Those at the places of `images` mean nothing.
        """

    async def expect(self, session: str) -> None:
        """Begin a conversation; an engine in deterministic mode waits for all active conversations."""

    async def park(self, session: str) -> None:
        """Pause a conversation: its cache may stay, and the engine does not wait for it until `expect`."""

    async def release(self, session: str) -> None:
        """End a conversation; the engine may drop its cache."""

    def __str__(self) -> str:
        return type(self).__name__

    def report_to(self, warn: Callable[[str], None]) -> None:
        """Set the function for lines that the user should see, such as the loss of a server."""

    def path(self) -> str:
        """Return how the engine decodes and why, as a part of a sentence; "" if it is not known here."""
        return ""

    def metrics(self) -> dict[str, float]:
        """Return numbers for the logs, counted since the start."""
        return {}

    def engines(self) -> Sequence[BaseClient]:
        """Return every engine behind this client, so that the canary can check each; a single one returns itself."""
        return (self,)

    async def resume(self) -> None:
        """Generate again after a pause; a trainer that was killed while it published may have left a server paused."""

    async def disconnect(self) -> None:
        """Close what belongs to the running event loop; the next request opens it again."""

    async def close(self) -> None:
        """Release everything."""
        await self.disconnect()

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling_params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Return one completion per prompt, in order. This is the synchronous form."""

        async def all_of_them() -> list[Completion]:
            pairs = zip(prompts, sampling_params, strict=True)
            try:
                return await asyncio.gather(*(self.generate(prompt, params) for prompt, params in pairs))
            finally:
                await self.disconnect()

        return run(all_of_them())


class BasePublisher(ABC):
    """One kind of weight sync. It does not trust the answer of an engine; the log-prob parity check runs afterwards."""

    @abstractmethod
    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Load the backend's weights as `version` into every engine; raise EngineError or WeightsError."""

    async def lend_device(self, backend: BaseBackend) -> None:
        """Free the device for the trainer: engines that share it release memory. May be called again at any time."""

    def take_device(self, backend: BaseBackend) -> None:
        """Do what every other rank must do after `lend_device` of the first one."""

    def follow(self, backend: BaseBackend) -> None:
        """Do what every other rank must do after the first one has published and all weights are gathered."""

    async def close(self) -> None:
        """Release what publishing needed."""
