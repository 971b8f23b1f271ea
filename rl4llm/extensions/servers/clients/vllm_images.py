"""Images in requests to vLLM: token ids exactly as given, and the tensors that vLLM's own processor makes of each image."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl4llm.core.errors import EngineError, RefusedError, UnreachableError
from rl4llm.core.images import ImagePlace
from rl4llm.extensions.servers.clients.images import data_uri, feature_name
from rl4llm.extensions.servers.clients.server import field

if TYPE_CHECKING:
    from rl4llm.data.vision import Vision

GENERATE = "/inference/v1/generate"
RENDER = "/v1/chat/completions/render"
KEPT = 32  # images whose tensors stay in memory, as text: 25 kB for each of their tokens


class RenderedImages:
    """Has a vLLM server make the tensors of images, once for each image; `post` sends it a request."""

    def __init__(self, post: Callable[[str, Mapping[str, Any]], Awaitable[Any]], where: str):
        self._post, self._where = post, where
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._rendering = asyncio.Lock()

    async def features(
        self, vision: Vision, images: Sequence[ImagePlace], model: str, weights: str
    ) -> dict[str, Any]:
        """Return the field `features` of a request to the server while it holds the weights named `weights`."""
        return {
            "mm_hashes": {"image": [feature_name(place.image, weights) for place in images]},
            "mm_placeholders": {
                "image": [{"offset": place.offset, "length": place.length} for place in images]
            },
            "kwargs_data": {"image": [await self._rendered(vision, place, model) for place in images]},
        }

    async def _rendered(self, vision: Vision, place: ImagePlace, model: str) -> str:
        digest = place.image.digest
        async with self._rendering:
            if digest not in self._kept:
                self._kept[digest] = await self._render(vision, place, model)
            self._kept.move_to_end(digest)
            data = self._kept[digest]
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return data

    async def _render(self, vision: Vision, place: ImagePlace, model: str) -> str:
        url = {"url": data_uri(vision, place.image)}
        part = {
            "type": "image_url",
            "image_url": url,
            "uuid": feature_name(place.image, secrets.token_hex(8)),
        }
        try:
            answer = await self._post(
                RENDER, {"model": model, "messages": [{"role": "user", "content": [part]}]}
            )
        except RefusedError as error:
            raise EngineError(f"{error} Images need --enable-scale-out of the server.") from error
        features = field(answer, "features", RENDER)
        (data,), (at,) = (
            field(features, "kwargs_data", RENDER)["image"],
            field(features, "mm_placeholders", RENDER)["image"],
        )
        if at["length"] != place.length:
            raise EngineError(
                f"{self._where} makes {at['length']} tokens of an image of {place.length}. Start it with the "
                "preprocessor_config.json of model.path."
            )
        if not isinstance(data, str):  # as of an image that the server has processed before
            raise UnreachableError(f"{self._where} rendered an image without its tensors.")
        return data


def with_features(
    body: Mapping[str, Any], model: str, token_ids: list[int], features: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of a request to /inference/v1/generate, given the options of one to /v1/completions."""
    names = ("request_id", "return_token_ids")
    return {
        "model": model,
        "token_ids": token_ids,
        "features": features,
        "sampling_params": {name: value for name, value in body.items() if name not in names},
        **{name: body[name] for name in names},
    }


def as_completion(answer: Any, prompt_ids: list[int], where: str) -> dict[str, Any]:
    """Return an answer of /inference/v1/generate in the form of /v1/completions.

    Raises EngineError if the server read other tokens than these.
    """
    if field(answer, "prompt_token_ids", where) != prompt_ids:
        raise EngineError(f"{where} read other tokens than those of the prompt, which has images.")
    choices = []
    for choice in field(answer, "choices", where):
        content = (choice.get("logprobs") or {}).get("content")
        logprobs = {"token_logprobs": content and [item["logprob"] for item in content]}
        choices.append({**choice, "logprobs": logprobs, "prompt_logprobs": answer.get("prompt_logprobs")})
    return {"choices": choices}
