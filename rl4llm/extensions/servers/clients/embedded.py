"""Servers of the embedded engine (`rl4llm serve --engine embedded`), which speak SGLang's native interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl4llm.core.errors import ConfigError, EngineError
from rl4llm.core.images import ImagePlace
from rl4llm.extensions.servers.clients.images import data_uri
from rl4llm.extensions.servers.clients.server import field
from rl4llm.extensions.servers.clients.sglang import SGLangClient


class EmbeddedClient(SGLangClient):
    """One server of the embedded engine.

        client = EmbeddedClient("http://127.0.0.1:30200", tokenizer, vocab_size=49152, context_length=4096)

    The same seed gives the same tokens as in the trainer's process. It takes weights from files only, and keeps its memory.
    For images the server needs ``model.vision=frozen``.
    """

    keeps_features = False
    EXPANDS = False
    publishers = ("filesystem",)
    URL_VARIABLE = "EMBEDDED_BASE_URL"
    USUAL_URL = "http://127.0.0.1:30200"
    UNSEEN = "does not exist on the server's machine"
    SEEDS = 2**63

    def _prompt(self, token_ids: list[int], images: Sequence[ImagePlace]) -> dict[str, Any]:
        """Return the fields of a request for exactly these tokens; the server compares digests and lengths with its own."""
        if self.vision is None or not images:
            return {"input_ids": token_ids}
        places = [
            {
                "digest": place.image.digest,
                "offset": place.offset,
                "length": place.length,
                "image": data_uri(self.vision, place.image),
            }
            for place in images
        ]
        return {"input_ids": token_ids, "images": places}

    async def _generate(self, body: Mapping[str, Any]) -> tuple[Any, str | None]:
        answer, adapter = await super()._generate(body)
        digests = [image["digest"] for image in body.get("images", ())]
        if digests and field(answer, "meta_info", "/generate").get("images") != digests:
            raise EngineError(f"{self} did not get the images of a request. Remove inference.router.")
        return answer, adapter

    def _numerics(self) -> Mapping[str, str]:
        return {"autocast": self.autocast} if self.autocast else {}

    async def lacks_weights(self) -> bool:
        return False

    async def health(self) -> dict[str, Any]:
        return await self.http.get("/health", deadline_s=30)

    async def _check_saver(self) -> None:
        raise ConfigError(
            "inference.name=embedded cannot be combined with inference.cohost. Use inference.name=local."
        )
