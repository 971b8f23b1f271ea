"""LoRA adapters on a server: each version under a name of its own, which leaves after its last request."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rl4llm.core.types import WeightRef


class Adapters:
    """What a client knows of its adapters on one server; `current` is the one to sample from, None for the model itself.

    `prefix` is what their names begin with. One trainer at a time may use it on a server.
    """

    def __init__(self, prefix: str):
        self._prefix = prefix
        self._used: Counter[str] = Counter()
        self._leaving: set[str] = set()
        self.current: str | None = None

    def name(self, weight_ref: WeightRef) -> str:
        """What a version is called on the server."""
        return adapter_name(self._prefix, weight_ref)

    def ours(self, names: Iterable[str]) -> set[str]:
        """Those of the names that a trainer with this prefix gave."""
        pattern = re.compile(re.escape(self._prefix) + r"-[0-9a-f]{8}-v\d{6,}")
        return {name for name in names if pattern.fullmatch(name)}

    def take(self, name: str | None, superseded: Iterable[str]) -> None:
        """Sample from `name` from now on; the superseded ones leave when they are not in use."""
        self.current = name
        self._leaving = (self._leaving | set(superseded)) - {name}

    def to_unload(self) -> set[str]:
        """What nobody uses any more; to be confirmed by `gone`."""
        return {name for name in self._leaving if not self._used[name]}

    def gone(self, names: Iterable[str]) -> None:
        """The server does not hold these any more."""
        self._leaving -= set(names)

    @contextmanager
    def using_current(self) -> Iterator[str | None]:
        """The adapter for a request, which stays until the request ends."""
        name = self.current
        if name is None:
            yield None
            return
        self._used[name] += 1
        try:
            yield name
        finally:
            self._used[name] -= 1


def adapter_name(prefix: str, weight_ref: WeightRef) -> str:
    """The name of a version's adapter, which differs where the content does: servers remember what they loaded by name."""
    content = repr(sorted(weight_ref.checksums.items())) if weight_ref.checksums else str(weight_ref.path)
    return f"{prefix}-{hashlib.sha256(content.encode()).hexdigest()[:8]}-v{weight_ref.version:06d}"


def adapter_version(name: str) -> int:
    """The version in a name from `adapter_name`."""
    return int(name.rpartition("-v")[2])
