"""LoRA adapters on a server: each version has its own name, and leaves after its last request."""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar

from rl4llm.core.errors import EngineError, RefusedError, UnreachableError
from rl4llm.core.images import ImagePlace
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.server import NEVER_LOADED, ServerClient, field


class AdaptingClient(ServerClient):
    """A client of a server that can hold adapters beside its model: later requests name the newest, and nothing pauses.

    Args:
        adapter: the prefix of the names of adapters. One trainer at a time may use it on a server.
    """

    ADAPTERS_AT: ClassVar[str] = ""
    """The path in front of load_lora_adapter and unload_lora_adapter."""

    def __init__(self, base_url: str, tokenizer: Any, *, adapter: str = "rl4llm", **options: Any):
        super().__init__(base_url, tokenizer, **options)
        self._prefix = adapter
        self._requests_with: Counter[str] = Counter()
        self._leaving: set[str] = set()
        self.adapter: str | None = None  # which requests name; None for the model itself

    @abstractmethod
    async def admin(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send an operator's request, once: half-done work must not be repeated without looking."""

    @abstractmethod
    async def base_version(self) -> int:
        """Return the version of the model under the adapters."""

    @abstractmethod
    async def score_once(
        self, token_ids: list[int], request_id: str, images: Sequence[ImagePlace]
    ) -> list[float]:
        """Ask once for the log-probs of given tokens."""

    async def version(self) -> int:
        if self.adapter is None:
            return await self.base_version()
        return adapter_version(self.adapter) if self.adapter in await self._listed() else NEVER_LOADED

    async def score(self, token_ids: Sequence[int], images: Sequence[ImagePlace] = ()) -> list[float]:
        self.check_prompt(token_ids, images)
        name = self.names.next("", "score")
        return await self.retry.run(
            lambda attempt: self.score_once(list(token_ids), f"{name}/a{attempt}", images)
        )

    async def load(self, weight_ref: WeightRef) -> None:
        """Load weights. An adapter ("lora") does not stop running requests, which end with the adapter they began with."""
        if weight_ref.kind != "lora":
            await super().load(weight_ref)
            return
        async with self._loading:
            await self.check_awake()
            await self._load_adapter(weight_ref)
            self.digest = await self.checksum()

    async def sample_from_model(self) -> None:
        """Name no adapter in later requests: the model itself has new weights."""
        if self.adapter is not None:
            await self._use(None, {self.adapter})

    @asynccontextmanager
    async def using_adapter(self) -> AsyncIterator[str | None]:
        """Yield the adapter that a request should name; it stays on the server until the block ends."""
        name = self.adapter
        self._requests_with.update([name] if name else [])
        try:
            yield name
        finally:
            self._requests_with.subtract([name] if name else [])
        if name != self.adapter:
            await self._unload_unused()

    async def attempted(self, path: str, body: Mapping[str, Any]) -> EngineError | None:
        """Return the error of an operator's request, if any, where something else decides whether it matters."""
        try:
            await self.admin(path, body)
        except EngineError as error:
            return error
        return None

    async def post_with(self, adapter: str | None, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a request that names an adapter; raises UnreachableError if it was unloaded meanwhile."""
        try:
            return await self.http.post(path, body)
        except RefusedError as error:
            if adapter is not None and adapter not in await self._listed():
                raise UnreachableError(str(error)) from error
            raise

    async def models(self, *, retries: bool = True) -> list[Mapping[str, Any]]:
        """Return what the server lists: its model, and the adapters beside it."""

        def get(_: int) -> Any:
            return self.http.get("/v1/models", deadline_s=30)

        answer = await (self.retry.run(get) if retries else get(0))
        models = field(answer, "data", "/v1/models")
        if not isinstance(models, list):
            raise UnreachableError(f"{self.base_url} lists no models.")
        return [item for item in models if isinstance(item, Mapping)]

    async def _load_adapter(self, weight_ref: WeightRef) -> None:
        name = adapter_name(self._prefix, weight_ref)
        before = await self._listed()
        if name not in before:
            body = {"lora_name": name, "lora_path": weight_ref.path}
            problem = await self.attempted(f"{self.ADAPTERS_AT}/load_lora_adapter", body)
            if name not in await self._listed():
                raise EngineError(f"{self} lacks {weight_ref.path}. {problem or 'See its log.'}") from problem
        await self._use(name, before)

    async def _use(self, name: str | None, superseded: Iterable[str]) -> None:
        """Name this adapter in later requests; superseded ones leave when no request uses them."""
        self.adapter = name
        self._leaving = (self._leaving | set(superseded)) - {name}
        await self._unload_unused()

    async def _unload_unused(self) -> None:
        """Unload superseded adapters that are not in use; what the server still lists afterwards is tried again later."""
        unused = {name for name in self._leaving if not self._requests_with[name]}
        for name in unused:
            await self.attempted(f"{self.ADAPTERS_AT}/unload_lora_adapter", {"lora_name": name})
        if unused:
            with suppress(EngineError):
                gone = unused - await self._listed()
                self._leaving -= gone

    async def _listed(self) -> set[str]:
        """Return the names of those adapters on the server that a trainer with this prefix loaded."""
        ours = re.compile(re.escape(self._prefix) + r"-[0-9a-f]{8}-v\d{6,}")
        names = (str(item.get("id")) for item in await self.models() if item.get("parent"))
        return {name for name in names if ours.fullmatch(name)}


def adapter_name(prefix: str, weight_ref: WeightRef) -> str:
    """Name a version's adapter; the name depends on the content, since servers remember what they loaded by name."""
    content = repr(sorted(weight_ref.checksums.items())) if weight_ref.checksums else str(weight_ref.path)
    return f"{prefix}-{hashlib.sha256(content.encode()).hexdigest()[:8]}-v{weight_ref.version:06d}"


def adapter_version(name: str) -> int:
    return int(name.rpartition("-v")[2])
