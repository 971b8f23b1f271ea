"""The inference side of a training run: an engine, its event loop, the publisher of its weights, and their proof.

Ranks that each hold a part of the weights gather them for the first rank, which publishes. A publisher iterates over the
weights as often as it needs to: once for files, once or more for servers, once more for a fallback. All ranks must take part
each time, so the first rank announces every iteration and the end of them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from rl4llm.core.base_backend import BaseAdapter, BaseBackend
from rl4llm.core.base_client import BaseClient, BasePublisher, TakesWeights
from rl4llm.core.weights import WeightRef
from rl4llm.runtime.ranks import Ranks
from rl4llm.runtime.runner import Runner
from rl4llm.sync.verify import Canary

T = TypeVar("T")
WEIGHTS, ADAPTER, OVER = "weights", "adapter", "over"


@dataclass(frozen=True, slots=True)
class Inference:
    """An engine, and the publisher that keeps its weights in sync with the trainer's.

        inference = Inference(client, MemoryPublisher(client))
        rollout = Rollout(env, client, renderer, inference.runner, seed=0)
        inference.publish(backend, version=0)

    All calls of the client must run in the event loop of `runner`. Without a `canary` the engine's weights are not checked.
    Training stops when the mean difference between the engine's log-probs and the trainer's exceeds `stop_above` nats.
    """

    client: BaseClient
    publisher: BasePublisher
    canary: Canary | None = None
    stop_above: float | None = None
    runner: Runner = field(default_factory=Runner)
    ranks: Ranks = field(default_factory=Ranks)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the client or the publisher, and return its result."""
        return self.runner.run(coroutine)

    def lend_device(self, backend: BaseBackend) -> None:
        """Have engines that share the trainer's device free their memory, on every rank."""
        self.ranks.wait()  # until no rank samples
        if self._asks_engines:
            self.run(self.publisher.lend_device(backend))
        self.ranks.wait()
        if not self._asks_engines:
            self.publisher.take_device(backend)

    def publish(
        self,
        backend: BaseBackend,
        version: int,
        clock: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Publish the backend's weights to the engines as `version`, and compare log-probs to check that they hold them.

        Raises EngineError or WeightsError when publishing fails, and StaleWeightsError when an engine holds other weights.
        """
        with clock("verify"):
            self.choose_tokens()
        with clock("publish"):
            self.lend_device(backend)
        with clock("verify"):  # the trainer's log-probs, while its model is on its device
            expected_BT = self.canary.expected(backend) if self.canary else None
        with clock("publish"):
            weight_ref = self._hand_over(backend, version)
        if self.canary and expected_BT is not None and self._asks_engines:
            with clock("verify"):
                self.run(self.canary.compare(expected_BT, self.client, weight_ref))
        self.ranks.wait()
        if self.canary and not self.client.in_process:
            self.canary.apart = self.ranks.share(self.canary.apart)

    def metrics(self) -> dict[str, float]:
        """Return those of the client, and how far the engines were from the trainer after the last publish."""
        apart = self.canary.apart if self.canary else None
        return {**self.client.metrics(), **({} if apart is None else {"mismatch/canary": apart})}

    def choose_tokens(self) -> None:
        """Have an engine sample the canary's tokens for all ranks, before the first publish, while engines are awake."""
        canary = self.canary
        if canary is not None and not canary.sampled:
            token_ids_BT = self.run(canary.sample(self.client)) if self.ranks.is_first else None
            canary.token_ids_BT, canary.sampled = self.ranks.share(token_ids_BT), True

    def close(self) -> None:
        """Release the publisher, the engine and the event loop."""
        self.run(self.publisher.close())
        self.run(self.client.close())
        self.runner.close()

    @property
    def _asks_engines(self) -> bool:
        """Return whether this rank sends weights to engines: each rank to an embedded one, the first rank to servers."""
        return self.ranks.is_first or self.client.in_process

    def _hand_over(self, backend: BaseBackend, version: int) -> WeightRef:
        publisher = self.publisher
        if self.client.in_process:
            return self.run(publisher.publish(backend, version))
        if self.ranks.is_first:
            whole: Any = backend if backend.whole else Announced(backend, self.ranks)
            try:
                weight_ref = self.run(publisher.publish(whole, version))
            finally:
                self.ranks.share(OVER)
            self.ranks.share(replace(weight_ref, tensors=None, held=True))
            return weight_ref
        gathers = {
            WEIGHTS: backend.own_weights,
            ADAPTER: backend.adapter.weights if backend.adapter else backend.own_weights,
        }
        while gather := gathers.get(self.ranks.share(None)):  # takes part in each iteration of the first rank
            for _ in gather():
                pass
        publisher.follow(backend)
        weight_ref = self.ranks.share(None)
        self.run(self.client.load(weight_ref))
        return weight_ref


class Announced:
    """A backend or its adapter as publishers see it on the first rank: an iteration over its weights includes all ranks."""

    def __init__(self, holder: BaseBackend | BaseAdapter, ranks: Ranks, name: str = WEIGHTS):
        self._holder = holder
        self._ranks = ranks
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._holder, name)

    @property
    def adapter(self) -> Announced | None:
        """Return the backend's adapter, wrapped too; None if it has none."""
        adapter = self._holder.adapter if isinstance(self._holder, BaseBackend) else None
        return None if adapter is None else Announced(adapter, self._ranks, ADAPTER)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of each weight. Runs to the end even if closed early, since the other ranks do."""
        self._ranks.share(self._name)
        weights = self._holder.weights()
        try:
            for item in weights:  # noqa: UP028 - "yield from" would close what is drained below
                yield item
        finally:
            for _ in weights:
                pass


class MemoryPublisher(BasePublisher):
    """Announces a new version to an engine in this process, which shares the trainer's weights.

    If this rank holds only a part of the weights, the engine has a separate model, and gets a copy of all of them.
    """

    def __init__(self, client: TakesWeights):
        self._client = client

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Have the engine report `version` with every token; copy the weights if it does not share them."""
        weight_ref = WeightRef(version, "memory", tensors=None if backend.whole else backend.own_weights)
        await self._client.load(weight_ref)
        return weight_ref


def in_memory(client: TakesWeights, store: Any, tokenizer: Any) -> BasePublisher:
    """Make the publisher of sync.name=memory, which needs neither a store nor a tokenizer."""
    return MemoryPublisher(client)
