"""Images among the tokens of requests; loaded with the first request that has any.

Inside the engine a token that stands for an image is a negative number, made from the image's digest. So sequences are
equal, and share what is cached, exactly where tokens and images are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl4llm.core.errors import RefusedError
from rl4llm.core.images import Image, ImagePlace, tower_of
from rl4llm.inference.embedded.kv_cache import Window

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Seen:
    """The images of a sequence: their places, and the positions (T, A) of its tokens."""

    places: tuple[ImagePlace, ...]
    axes: Ints

    def positions(self, start: int, count: int) -> Ints:
        """Return the positions (count, A) of tokens from `start` on; those after the sequence are text."""
        axes = self.axes[start : start + count]
        position = int(self.axes.max()) + 1 + max(0, start - len(self.axes))
        after = np.arange(position, position + count - len(axes))
        return np.concatenate([axes, np.repeat(after[:, None], self.axes.shape[1], 1)])


def see(
    model: Any, where: str, token_ids: Sequence[int], places: Sequence[ImagePlace]
) -> tuple[list[int], Seen]:
    """Return the tokens with a negative number for each that stands for an image, and the images.

    Raises RefusedError for places that are not in order, not of the model's length or not before the last token.
    """
    tower = tower_of(model)
    if tower is None:
        raise RefusedError(
            f"{where}: the prompt has images, but the model reads text. Set model.vision=frozen."
        )
    ids, end = list(token_ids), 0
    for place in places:
        tokens = tower.vision.tokens(place.image)
        if place.offset < end or place.length != tokens or place.end >= len(token_ids):
            raise RefusedError(
                f"{where}: an image of {tokens} tokens cannot be at {place.offset} to {place.end} of {len(token_ids)} "
                "tokens. Images are in order, do not overlap, and text follows the last one."
            )
        end = place.end
        ids[place.offset : end] = [-1 - int(place.image.digest[:15], 16)] * tokens
    return ids, Seen(tuple(places), tower.vision.positions(len(token_ids), places))


def show(
    window: Window, starts: Sequence[int], seen: Sequence[Seen | None], tokens_BS: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Tell a window of the images among its tokens, and return the tokens with ids of the vocabulary."""
    rows = list(zip(starts, seen, strict=True))
    device = window.positions_BS.device
    axes = next(item.axes.shape[1] for item in seen if item is not None)
    if axes > 1:
        texts = np.repeat(np.arange(window.count)[:, None], axes, 1)  # without images all axes are alike
        each = [
            start + texts if item is None else item.positions(start, window.count) for start, item in rows
        ]
        window.axes_ABS = torch.from_numpy(np.stack(each)).permute(2, 0, 1).contiguous().to(device)
    begins: dict[Image, int] = {}
    features = np.full((len(rows), window.count), -1)
    total = 0
    for row, (start, item) in enumerate(rows):
        for place, begin, end in _parts(start, window.count, item):
            if place.image not in begins:
                begins[place.image], total = total, total + place.length
            offset = begins[place.image] + start - place.offset
            features[row, begin:end] = np.arange(begin, end) + offset
    if begins:
        window.features = torch.from_numpy(features).to(device), tuple(begins)
    return [[max(token, 0) for token in row] for row in tokens_BS]


def window_of(make: Callable[[], Window], starts: Sequence[int], seen: Sequence[Seen | None]) -> Window:
    """Return the window of a step in which rows with images take part."""
    window = make()
    show(window, starts, seen, [])
    return window


def _parts(start: int, count: int, seen: Seen | None) -> Iterator[tuple[ImagePlace, int, int]]:
    """Yield the places with tokens in a window, each with the first and the end of its columns there."""
    for place in () if seen is None else seen.places:
        begin, end = max(place.offset - start, 0), min(place.end - start, count)
        if begin < end:
            yield place, begin, end
