"""Images: as they are given, as the model sees them, and their places among tokens."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as a data set, a tool or an environment gives it: the bytes of a PNG, JPEG or WebP file."""

    data: bytes = field(repr=False)

    def to_part(self) -> dict[str, Any]:
        """Return the picture as a content part with a data URI, in the form of OpenAI."""
        kind = "jpeg" if self.data[:2] == b"\xff\xd8" else "webp" if self.data[:4] == b"RIFF" else "png"
        url = f"data:image/{kind};base64,{base64.b64encode(self.data).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True, slots=True)
class Image:
    """The name and size of an image; its pixels are in the run's `ImageStore`.

    The pixels are RGB and have the size at which the model sees them: they are resized once, when they are read.
    `digest` is the SHA-256 of size and pixels, in hex.
    """

    digest: str
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """`length` tokens from `offset` on that stand for an image. Nothing else marks them: a token with the placeholder's id
    outside of all places is a token like any other."""

    image: Image
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def moved(places: Iterable[ImagePlace], tokens: int) -> tuple[ImagePlace, ...]:
    """Return the places with `tokens` more tokens before them."""
    return tuple(replace(place, offset=place.offset + tokens) for place in places)


TOWER = "_rl4llm_tower"
IMAGE_SIDE = "image_side"
"""The module of a text model that holds an image side which trains."""


def tower_of(model: Any) -> Any:
    """Return the image side that was put beside a text model, a `Tower`; None if the model reads text alone."""
    return getattr(model, TOWER, None)
