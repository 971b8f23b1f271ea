"""What a family of vision-language models makes of an image: its size, its number of tokens, their positions.

    vision = Vision(model_directory, ImageStore())
    image = vision.see(picture)                  # resized once, stored by digest
    vision.tokens(image)                         # placeholders in the prompt
    vision.positions(len(token_ids), places)     # along three axes for families with a grid of positions

Everything is read from the model's config and its image processor, and the size is found by trying the processor. Either
the processor cuts an image into a grid of patches, whose tokens have rows and columns, or it resizes every image to one size
with one number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from transformers import AutoConfig, AutoImageProcessor

from rl4llm.core.errors import DataError, ModelError, TemplateError
from rl4llm.core.images import Image, ImagePlace, Picture
from rl4llm.core.types import TokenSpan
from rl4llm.data.images import ImageStore, Pixels, canonical, read_picture, size_of

MAX_SEEN = 4096  # pictures whose images are remembered
PROBE_SIZE = 64, 96  # pixels, before the model's own resizing; not square: rows and columns must differ
WIDE = 288, 800  # pixels of an image that processors with crops or tiles would cut
LENGTHS = "image_seq_length", "mm_tokens_per_image"  # keys with the tokens of every image
INPUTS = "pixel_values", "image_grid_thw"
UNFIT = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What processors raise for sizes and arguments that they do not take."""


def fixed_tokens(config: Any) -> int:
    """Return the tokens of every image in a family in which all have equally many, else 0."""
    return int(next(filter(None, (getattr(config, name, None) for name in LENGTHS)), 0))


class Vision:
    """The image side of a model directory.

    Args:
        path: of the model, with `config.json` and the files of its image processor.
        store: where the pixels are kept.

    Raises ModelError for a model without images, and for a family that is not supported.

    Attributes:
        placeholder: the id of the token that stands for an image in the template's rendering.
        media: that id, and the one of videos.
        see: returns the image that the model sees of a picture.
        fit: returns the height and width that the processor makes of those of an image.
        axes: the number of axes of a position: 3 (time, row, column) or 1.
    """

    def __init__(self, path: str | Path, store: ImageStore):
        self.store, self._path = store, str(path)
        self.config = AutoConfig.from_pretrained(self._path, local_files_only=Path(path).is_dir())
        placeholder = getattr(self.config, "image_token_id", None)
        if placeholder is None:
            raise ModelError(f"model.vision: {type(self.config).__name__} in {self._path!r} sees no images.")
        self.placeholder = int(placeholder)
        self.media = self.placeholder, int(getattr(self.config, "video_token_id", None) or placeholder)
        text = self.config.get_text_config()
        rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
        self.axes = 3 if "mrope_section" in rope else 1
        self.see = lru_cache(MAX_SEEN)(self._see)
        self.fit = lru_cache(MAX_SEEN)(self._fit)
        self._length = fixed_tokens(self.config)
        self._check()

    def probe(self) -> tuple[list[int], tuple[ImagePlace, ...]]:
        """Return a few tokens with a small image of noise among them, the same in every run, and its place."""
        image = self.store.add(_noise(*self.fit(*PROBE_SIZE)))
        tokens = self.tokens(image)
        start, end = (getattr(self.config, f"vision_{name}_token_id", 1) for name in ("start", "end"))
        return [1, start, *[self.placeholder] * tokens, end, 2, 3], (ImagePlace(image, 2, tokens),)

    def count(self, picture: Picture) -> int:
        """Return the number of tokens of a picture; only its header is read."""
        height, width = self.fit(*size_of(picture))
        return self.tokens(Image("", height, width))

    def span(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> TokenSpan:
        """Return rendered tokens as context in which each placeholder became as many as its picture has tokens.

        Raises TemplateError if the template did not write a placeholder for each picture.
        """
        written = sum(token == self.placeholder for token in token_ids)
        if written != len(pictures):
            raise TemplateError(f"it writes {written} placeholders for {len(pictures)} images")
        waiting = iter(pictures)
        spread: list[int] = []
        places: list[ImagePlace] = []
        for token in token_ids:
            if token == self.placeholder:
                image = self.see(next(waiting))
                places.append(ImagePlace(image, len(spread), self.tokens(image)))
            spread += [token] * (places[-1].length if token == self.placeholder else 1)
        return TokenSpan.context(spread, places)

    def tokens(self, image: Image) -> int:
        """Return the number of tokens that stand for an image."""
        if self._length:
            return self._length
        return math.prod(self._grid(image))

    def positions(self, length: int, places: Sequence[ImagePlace]) -> NDArray[np.int64]:
        """Return the positions (length, axes) of a sequence's tokens.

        Text counts along all axes alike. The tokens of an image share the first and count its rows and columns along the
        others; the text after it begins behind the largest of them (Qwen2-VL, arXiv:2409.12191, section 2.1).
        """
        if self.axes == 1:
            return np.arange(length, dtype=np.int64)[:, None]
        positions = np.empty((length, 3), np.int64)
        done, begin = 0, 0
        for place in places:
            ahead = place.offset - done
            positions[done : place.offset] = np.arange(begin, begin + ahead)[:, None]
            begin += ahead
            rows, columns = self._grid(place.image)
            positions[place.offset : place.end, 0] = begin
            positions[place.offset : place.end, 1] = begin + np.repeat(np.arange(rows), columns)
            positions[place.offset : place.end, 2] = begin + np.tile(np.arange(columns), rows)
            begin, done = begin + max(rows, columns), place.end
        positions[done:] = np.arange(begin, begin + length - done)[:, None]
        return positions

    def inputs(self, pixels: Sequence[Pixels]) -> dict[str, Any]:
        """Return the arguments of the model's `get_image_features` for canonical pixels (H, W, 3)."""
        features = self._processor(
            images=list(pixels), do_resize=False, input_data_format="channels_last", return_tensors="pt"
        )
        return {name: features[name] for name in INPUTS if name in features}

    def _see(self, picture: Picture) -> Image:
        """Return the image that the model sees; raises DataError for one that cannot be read or is out of proportion."""
        return self.store.add(canonical(picture, self.fit, int(self._processor.resample)))

    def _fit(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that the processor makes of an image of this size."""
        try:
            features = self._made(np.zeros((height, width, 3), np.uint8))
        except ValueError as error:
            raise DataError(f"the model refuses an image of {height} x {width} pixels: {error}.") from error
        if self._length:
            *_, height, width = np.shape(features["pixel_values"])
            return height, width
        _, rows, columns = (int(count) for count in np.asarray(features["image_grid_thw"])[0])
        return rows * self._patch, columns * self._patch

    def _grid(self, image: Image) -> tuple[int, int]:
        """Return the rows and columns of the tokens of an image."""
        return image.height // self.side, image.width // self.side

    @cached_property
    def side(self) -> int:
        """The side of what becomes one token, in pixels."""
        return self._patch * int(self._processor.merge_size)

    @property
    def _patch(self) -> int:
        """The side of a patch, in pixels."""
        return int(self._processor.patch_size)

    def _made(self, pixels_HWC: Pixels) -> dict[str, Any]:
        """Return what the processor makes of an image in any size."""
        return dict(
            self._processor(images=[pixels_HWC], input_data_format="channels_last", return_tensors="pt")
        )

    def _check(self) -> None:
        """Raise ModelError unless the processor makes of a wide image what it makes of its pixels, resized once."""
        wide, processor = _noise(*WIDE), self._processor
        try:
            features = self._made(wide)
            picture = read_picture(PIL.Image.fromarray(wide))
            once = self.inputs([canonical(picture, self.fit, int(processor.resample))])
            same = all(np.array_equal(features[name], once[name]) for name in once)
            same = same and (not self._length or self.fit(*PROBE_SIZE) == self.fit(*WIDE))
        except UNFIT:
            same = False
        if not same:
            raise ModelError(
                f"model.vision: the image processor of {self._path!r} does more than resize an image once, to a grid of "
                "patches or to one size. Switch crops and tiles off in preprocessor_config.json, or use another family."
            )

    @cached_property
    def _processor(self) -> Any:
        return AutoImageProcessor.from_pretrained(
            self._path, local_files_only=Path(self._path).is_dir(), backend="pil"
        )


def _noise(height: int, width: int) -> Pixels:
    """Return pixels (H, W, 3) that are the same in every run."""
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
