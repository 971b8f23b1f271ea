"""Servers of the embedded engine (`rl4llm serve --engine embedded`), which speak SGLang's native interface."""

from __future__ import annotations

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.servers.clients.sglang import SGLangClient


class EmbeddedClient(SGLangClient):
    """One server of the embedded engine.

        client = EmbeddedClient("http://127.0.0.1:30200", tokenizer, vocab_size=49152, context_length=4096)

    The same seed gives the same tokens as in the trainer's process. It takes weights from files only, and keeps its memory.
    """

    takes_images = False
    publishers = ("filesystem",)
    KINDS = ("full",)
    URL_VARIABLE = "EMBEDDED_BASE_URL"
    USUAL_URL = "http://127.0.0.1:30200"
    UNSEEN = "does not exist on the server's machine"
    SEEDS = 2**63

    async def _check_saver(self) -> None:
        raise ConfigError(
            "inference.cohost=true is not accepted with inference.name=embedded, whose servers keep their memory. Accepted: "
            "inference.name=local, which shares the trainer's weights."
        )
