"""The images among the tokens that are packed into batches; loaded only where there are any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rl4llm.core.errors import ConfigError
from rl4llm.core.images import Image, ImagePlace
from rl4llm.core.types import Trajectory, images_of
from rl4llm.data.pack import Ints


@dataclass(frozen=True, slots=True)
class Shown:
    """The images among the tokens of all trajectories, one after another.

    `image_ids` numbers `images`, -1 for other tokens, and `within` counts the tokens of an image. `axes` (N, A) are
    positions; None if the model counts along one axis.
    """

    images: tuple[Image, ...]
    lengths: Ints
    image_ids: Ints
    within: Ints
    axes: Ints | None

    @classmethod
    def of(
        cls, trajectories: Sequence[Trajectory], positions: Callable[[int, Sequence[ImagePlace]], Ints] | None
    ) -> Shown:
        """Return the images among these trajectories' tokens; there must be some."""
        if positions is None:
            raise ConfigError("A trajectory has images, but the model sees none. Set model.vision=frozen.")
        places = [images_of(trajectory.spans) for trajectory in trajectories]
        sizes = [trajectory.num_tokens for trajectory in trajectories]
        image_ids, within = np.full(sum(sizes), -1), np.zeros(sum(sizes), np.int64)
        lengths: dict[Image, int] = {}
        numbers: dict[Image, int] = {}
        start = 0
        for size, row in zip(sizes, places, strict=True):
            for place in row:
                lengths[place.image] = place.length
                tokens = slice(start + place.offset, start + place.end)
                image_ids[tokens] = numbers.setdefault(place.image, len(numbers))
                within[tokens] = np.arange(place.length)
            start += size
        axes = np.concatenate([positions(size, row) for size, row in zip(sizes, places, strict=True)])
        counts = np.array([lengths[image] for image in numbers])
        return cls(tuple(numbers), counts, image_ids, within, axes if axes.shape[1] > 1 else None)

    def features(self, source: Ints) -> tuple[tuple[Image, ...], Ints]:
        """Return the images of these tokens, and the number of each token among the tokens of those images; -1: none."""
        ids = self.image_ids[source]
        used = np.unique(ids[ids >= 0])
        begins = np.zeros(len(self.images), np.int64)
        begins[used] = np.cumsum(self.lengths[used]) - self.lengths[used]
        numbers = np.where(ids >= 0, begins[ids] + self.within[source], -1)
        return tuple(self.images[i] for i in used), numbers
