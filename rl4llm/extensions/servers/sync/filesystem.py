"""Weight sync through a shared file system: write a version, verify it, have every server load it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rl4llm.backends.source_form import save_tokenizer
from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_client import BasePublisher, TakesWeights
from rl4llm.core.errors import WeightsError
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.runs.run_dir import is_full
from rl4llm.runtime.threads import in_own_thread

logger = logging.getLogger(__name__)


class FilesystemPublisher(BasePublisher):
    """Publishes weights as a directory that every server can read under the same absolute path.

    `save_tokenizer` writes the tokenizer's files, so that a server can also be started from a version.
    """

    def __init__(
        self,
        client: TakesWeights,
        store: WeightStore,
        save_tokenizer: Callable[[Path], object] = lambda _: None,
    ):
        self._client = client
        self._store = store
        self._save_tokenizer = save_tokenizer

    async def publish(self, backend: BaseBackend, version: int) -> WeightRef:
        """Write `version` and have all servers load it.

        Raises WeightsError when it cannot be written or is damaged, and EngineError when a server cannot load it.
        """
        weight_ref = await in_own_thread("rl4llm-write", partial(self.write, backend, version))
        await self.hand_over(weight_ref)
        return weight_ref

    async def hand_over(self, weight_ref: WeightRef) -> None:
        """Have all servers load a version, which stays in the store for as long as that takes."""
        with self._store.lease(weight_ref.version):
            await self._client.load(weight_ref)

    async def close(self) -> None:
        """Release the store's directory."""
        self._store.close()

    def write(self, backend: BaseBackend, version: int) -> WeightRef:
        """Write a version into the store, and read it back to verify it."""
        try:
            weight_ref = self._write(backend, version)
        except WeightsError as error:
            if error.__cause__ is None or not is_full(error.__cause__) or not self._store.leave_memory():
                raise
            logger.warning("Shared memory is full, so weights are published through files: %s", error)
            weight_ref = self._write(backend, version)
        self._store.verify(weight_ref)
        return weight_ref

    def _write(self, backend: BaseBackend, version: int) -> WeightRef:
        def write_config(directory: Path) -> None:
            backend.write_config(directory)
            self._save_tokenizer(directory)

        return self._store.write(version, backend.weight_specs(), backend.weights(), write_config)


class LoraPublisher(FilesystemPublisher):
    """Publishes the adapter alone: megabytes instead of the whole model, and running requests do not stop for it.

    The servers' own weights must be those of the trainer's frozen model; the canary checks that.
    """

    def _write(self, backend: BaseBackend, version: int) -> WeightRef:
        adapter = backend.adapter
        assert adapter is not None  # sync.name=lora needs model.lora.rank
        return self._store.write(
            version, adapter.specs(), adapter.weights(), adapter.write_config, kind="lora"
        )


def over_filesystem(client: TakesWeights, store: Callable[[], WeightStore], tokenizer: Any) -> BasePublisher:
    """Make the publisher of sync.name=filesystem."""
    return FilesystemPublisher(client, store(), partial(save_tokenizer, tokenizer))


def over_adapter(client: TakesWeights, store: Callable[[], WeightStore], tokenizer: Any) -> BasePublisher:
    """Make the publisher of sync.name=lora."""
    return LoraPublisher(client, store())
