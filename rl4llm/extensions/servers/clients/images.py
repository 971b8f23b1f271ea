"""Images in requests to servers: their pixels, and a name under which a server may keep what it computes from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl4llm.core.errors import ConfigError
from rl4llm.core.images import Image, ImagePlace, Picture

if TYPE_CHECKING:
    from rl4llm.data.vision import Vision

UNNAMED = ("qwen3_vl", "qwen3_vl_moe")
"""Families in which SGLang 0.5.23 marks the tokens of an image with another name, and dies if a request names it."""


def feature_name(image: Image, weights: str) -> str:
    """Return a name, in hex, for what the weights named `weights` make of an image.

    Servers keep the features of images by such names, also when their weights change.
    """
    return hashlib.sha256(f"{image.digest}/{weights}".encode()).hexdigest()


def check_features_are_named(vision: Vision) -> None:
    """Raise ConfigError for a family in which SGLang would use features of images that an earlier tower made."""
    if (family := vision.config.model_type) in UNNAMED:
        raise ConfigError(f"SGLang needs model.vision=frozen for {family}: it keeps the features of images.")


def data_uri(vision: Vision, image: Image) -> str:
    """Return the pixels of an image, without loss, as a data URI."""
    return str(Picture(vision.store.png(image)).to_part()["image_url"]["url"])


def collapsed(token_ids: Sequence[int], images: Sequence[ImagePlace]) -> list[int]:
    """Return the tokens with one in place of those of each image.

    >>> collapsed([5, 9, 9, 9, 6], [ImagePlace(Image("", 28, 84), 1, 3)])
    [5, 9, 6]
    """
    done, ids = 0, list[int]()
    for place in images:
        ids += token_ids[done : place.offset + 1]
        done = place.end
    return ids + list(token_ids[done:])


def outside(tokens: Sequence[int], token_ids: Sequence[int], images: Sequence[ImagePlace]) -> bool:
    """Return whether any of these tokens occurs outside of the places of images."""
    covered = {n for place in images for n in range(place.offset, place.end)}
    return any(token in tokens and n not in covered for n, token in enumerate(token_ids))
