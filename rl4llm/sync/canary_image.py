"""The image that a canary looks at, so that an engine with old or other features of images is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl4llm.core.images import ImagePlace
from rl4llm.core.types import TrainBatch

if TYPE_CHECKING:
    from rl4llm.data.vision import Vision


class CanaryImage:
    """Begins the last of the canary's sequences: a few tokens with an image of noise, the same in every run.

    Attributes:
        token_ids: how the sequence begins.
        places: that of the image among them.
    """

    def __init__(self, vision: Vision):
        self._vision = vision
        self.token_ids, self.places = vision.probe()

    def begun(self, token_ids_BT: Tensor) -> Tensor:
        """Return the sequences; the last one begins with the image, and no other token is a placeholder.

        Some servers take every placeholder for an image.
        """
        token_ids_BT[torch.isin(token_ids_BT, torch.tensor(self._vision.media))] = 0
        token_ids_BT[-1, : len(self.token_ids)] = torch.tensor(self.token_ids)
        return token_ids_BT

    def images(self, row: int, rows: int) -> Sequence[ImagePlace]:
        """Return the images of one of the sequences."""
        return self.places if row == rows - 1 else ()

    def compared(self, logprobs_BT: Tensor) -> Tensor:
        """Return the log-probs of the tokens that follow what is given, (N,); those of image tokens mean nothing."""
        compared_BT = torch.ones_like(logprobs_BT, dtype=torch.bool)
        compared_BT[-1, : len(self.token_ids) - 1] = False
        return logprobs_BT[compared_BT]

    def shown(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch of the sequences with the image in the last."""
        rows, length = batch.token_ids_BT.shape
        feature_ids_BT = torch.full((rows, length), -1)
        (place,) = self.places
        feature_ids_BT[-1, place.offset : place.end] = torch.arange(place.length)
        axes = [self._vision.positions(length, self.images(row, rows)) for row in range(rows)]
        axes_BTA = torch.stack([torch.from_numpy(positions) for positions in axes])
        several = axes_BTA if self._vision.axes > 1 else None
        return replace(batch, feature_ids_BT=feature_ids_BT, images=(place.image,), axes_BTA=several)
