"""Images of the server of the embedded engine; loaded with model.vision.

A native request has exact token ids, and for each image among them

    {"digest": ..., "offset": ..., "length": ..., "image": "data:image/png;base64,..."}

The pixels have the size at which the model sees them, and are those of the digest. Nothing is resized here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rl4llm.backends.tower import add_tower
from rl4llm.core.errors import DataError
from rl4llm.core.images import IMAGE_SIDE, Image, ImagePlace, tower_of
from rl4llm.data.images import ImageStore, canonical, read_picture, size_of
from rl4llm.data.vision import Vision
from rl4llm.envs.wire import RequestError

FIELDS = {"digest": str, "offset": int, "length": int, "image": str}


def add_images(model: PreTrainedModel, path: str, kept: Path) -> None:
    """Put the image side of a checkpoint beside its text model, with weights that each version replaces.

    The images that the server has seen are in the directory `kept`.
    """
    add_tower(model, path, Vision(path, ImageStore(kept)))
    model.add_module(IMAGE_SIDE, tower_of(model).parts.to(model.device))


def read_images(vision: Vision, given: Any, tokens: int) -> tuple[ImagePlace, ...]:
    """Return the places of images among the `tokens` tokens of a request; the store then has their pixels.

    An image is decoded when its header and its place are known to fit, so that all pixels together are bounded by the
    request's tokens. Raises RequestError.
    """
    places: list[ImagePlace] = []
    try:
        for number, item in enumerate(given if isinstance(given, list) else [None]):
            places.append(_place(vision, item, places[-1].end if places else 0, tokens, f"images[{number}]"))
    except DataError as error:
        raise RequestError(f"images[{len(places)}]: {error}", param="images") from error
    return tuple(places)


def _place(vision: Vision, item: Any, start: int, tokens: int, where: str) -> ImagePlace:
    if not isinstance(item, Mapping) or {name: type(value) for name, value in item.items()} != FIELDS:
        raise RequestError(f"{where} must have {', '.join(FIELDS)}: {item!r:.100}.", param="images")
    picture = read_picture(item["image"])
    height, width = size_of(picture)
    image = Image(item["digest"], height, width)
    place = ImagePlace(image, item["offset"], item["length"])
    fits = (height % vision.side, width % vision.side, place.length) == (0, 0, vision.tokens(image))
    if not fits or not start <= place.offset < place.end < tokens:
        raise RequestError(
            f"{where}: an image of {height} x {width} pixels cannot be at {place.offset} to {place.end} of {tokens}.",
            param="images",
        )
    if (
        image not in vision.store
        and vision.store.add(canonical(picture, lambda height, width: (height, width), 0)) != image
    ):
        raise RequestError(f"{where}: its pixels are not those of its digest.", param="images")
    return place
