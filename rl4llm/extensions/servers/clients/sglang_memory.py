"""What an SGLang server has on its device: a version of the weights, less the memory that it freed while it sleeps.

SGLang does not report whether it sleeps, and dies when it is put to sleep twice or woken twice. So the client adds what
sleeps to the version of the weights, which the server keeps until it ends: "12", "12 asleep:kv_cache,weights". The note
survives the trainer that wrote it, but not the server.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl4llm.core.errors import EngineError

ASLEEP = " asleep:"
UNSURE = "unsure"
"""What sleeps while memory is freed or taken: a trainer that dies then leaves this note."""


@dataclass(frozen=True, slots=True)
class Held:
    """The version of a server's weights as it reports it, and the kinds of memory that it freed.

    >>> Held.of("12 asleep:weights").asleep, str(Held("13", frozenset({"weights"})))
    (frozenset({'weights'}), '13 asleep:weights')
    """

    version: str
    asleep: frozenset[str] = frozenset()

    @classmethod
    def of(cls, text: str) -> Held:
        """Read what `str` has written."""
        version, _, asleep = text.partition(ASLEEP)
        return cls(version, frozenset(filter(None, asleep.split(","))))

    def __str__(self) -> str:
        return self.version + (ASLEEP + ",".join(sorted(self.asleep)) if self.asleep else "")

    def check_known(self, url: str) -> None:
        """Raise EngineError if a trainer died while the server freed memory or took it."""
        if UNSURE in self.asleep:
            raise EngineError(
                f"{url} may be asleep or awake: a trainer ended while the server freed its memory or took it back. Restart "
                "the server."
            )
