"""Read images from strangers within limits, and keep the pixels that the model sees.

picture = read_picture(row["image"], directory)      # a file's bytes, checked by its header
image = store.add(canonical(picture, size))           # RGB pixels at the model's size, named by their digest
pixels_HWC = store.pixels(image)                      # the same bytes on every machine, after a resume too
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import secrets
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from rl4llm.core.errors import DataError
from rl4llm.core.images import Image, Picture
from rl4llm.core.message import is_encoded
from rl4llm.core.types import ChatMessage

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_BYTES, MAX_PIXELS, MAX_SIDE = 32 << 20, 1 << 25, 0xFFFF
"""Limits of an image: of its file, of its pixels, which take 3 bytes each when they are decoded, and of its sides."""

MAX_IMAGES = 64
"""The most images of a row."""

MARK = "<image>"

KEPT = 512  # images whose pixels stay in memory

_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # of EXIF
_TURNS = dict(enumerate(map(PIL.Image.Transpose, (0, 3, 1, 5, 4, 6, 2)), 2))  # by orientation

Pixels = NDArray[np.uint8]
"""RGB (H, W, 3)."""


def read_picture(value: Any, directory: Path | None = None) -> Picture:
    """Return the picture that a column, a content part or a tool gives.

    Accepted: a Picture, an image of Pillow, bytes of a file, ``{"bytes": ..., "path": ...}``, a data URI, base64 text, and a
    path relative to `directory`, below it. Raises DataError for anything else, addresses of the network among it, and for
    a file that is broken or exceeds the limits; only its header is decoded.
    """
    picture = _picture(value, directory)
    _opened(picture)
    return picture


def size_of(picture: Picture) -> tuple[int, int]:
    """Return the height and width of a picture as it is shown, read from its header."""
    return _shape(_opened(picture))


def canonical(picture: Picture, size: Callable[[int, int], tuple[int, int]], resample: int) -> Pixels:
    """Return RGB pixels, resized once to `size(height, width)`; transparent parts are white, EXIF rotations applied.

    Raises DataError for an image that cannot be decoded or resized.
    """
    image = _opened(picture)
    turn = _TURNS.get(_orientation(image))
    try:
        height, width = size(*_shape(image))
        image.load()
        if turn is not None:
            image = image.transpose(turn)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            ground = PIL.Image.new("RGBA", image.size, "white")
            image = PIL.Image.alpha_composite(ground, image)
        image = image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"the image cannot be used: {error}.") from error
    if (width, height) != image.size:
        image = image.resize((width, height), resample=resample)
    return np.asarray(image, np.uint8)


def _shape(image: PIL.Image.Image) -> tuple[int, int]:
    """Return the height and width of an opened image as it is shown; nothing is decoded."""
    turned = _orientation(image) in _ON_ITS_SIDE
    return (image.width, image.height) if turned else (image.height, image.width)


def _orientation(image: PIL.Image.Image) -> int:
    """Return how EXIF turns an image, 1 for broken metadata, which are no fault of the pixels."""
    try:
        # The method of PNG would decode the pixels, to find what may follow them.
        return int(PIL.Image.Image.getexif(image).get(_ORIENTATION, 1))
    except (OSError, ValueError, TypeError, SyntaxError, struct.error):
        return 1


class RowImages:
    """The images of a row: those inside its messages, and those of its `columns`, taken in order.

    The places of a column's images are content parts without data, ``{"type": "image"}``, or ``<image>`` in the texts; an
    image of a row that marks no place stands before the first message of the user. A picture that a second column holds
    again, such as its file beside its bytes, is not shown again.
    """

    def __init__(self, columns: Mapping[str, Any], directory: Path | None):
        self._directory = directory
        self._waiting: list[Picture] = []
        for value in columns.values():
            items = value if isinstance(value, list | tuple) else [value]
            pictures = [read_picture(item, directory) for item in items if item is not None]
            self._waiting += [picture for picture in pictures if picture not in self._waiting]
        self._found = 0

    def __call__(self, value: Any = None) -> Picture:
        """Return the picture of a content part, or the next one of the column for a part without data."""
        self._found += 1
        if self._found > MAX_IMAGES:
            raise DataError(f"the row has more than {MAX_IMAGES} images.")
        if value is not None:
            return read_picture(value, self._directory)
        if not self._waiting:
            raise DataError("the messages have more places for images than the row has images.")
        return self._waiting.pop(0)

    def placed(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return messages with the images of the columns at their places; raises DataError if any is left."""
        if not self._waiting:
            return list(messages)
        marks = sum(message.content.count(MARK) for message in messages)
        if marks == 0 and not self._found:
            place = next((n for n, message in enumerate(messages) if message.role == "user"), 0)
            pictures = [self() for _ in self._waiting[:]]
            return [
                replace(message, parts=(*pictures, message.content)) if number == place else message
                for number, message in enumerate(messages)
            ]
        if marks != len(self._waiting):
            raise DataError(
                f"the row has {len(self._waiting)} images and {marks} times {MARK!r} in its texts."
            )
        return [self._split(message) if MARK in message.content else message for message in messages]

    def _split(self, message: ChatMessage) -> ChatMessage:
        head, *rest = message.content.split(MARK)
        parts: list[str | Picture] = [head, *(part for text in rest for part in (self(), text))]
        return ChatMessage.showing(message.role, *(part for part in parts if part))


class ImageStore:
    """The canonical pixels of a run's images, by digest: in memory, and as PNG files in a directory.

    Nothing is written until `begun` is there, such as the file by which a run owns the directory around.
    """

    def __init__(self, directory: Path | None = None, begun: Path | None = None):
        self._directory, self._begun = directory, begun
        self._added: set[Image] = set()
        self._recent: OrderedDict[str, Pixels] = OrderedDict()
        self._unwritten: dict[str, Pixels] = {}
        self._lock = threading.Lock()

    def add(self, pixels_HWC: Pixels) -> Image:
        """Keep pixels (H, W, 3) and return their name."""
        height, width, _ = pixels_HWC.shape
        digest = _digest(pixels_HWC)
        image = Image(digest, height, width)
        if image not in self._added:
            self._unwritten[digest] = pixels_HWC
            self._remember(digest, pixels_HWC)
            self._added.add(image)  # last, for threads that ask whether it is there
        return image

    def __contains__(self, image: Image) -> bool:
        return image in self._added

    def pixels(self, image: Image) -> Pixels:
        """Return the pixels of an image (H, W, 3); raises DataError if their file is gone or is another image."""
        self._write()
        with self._lock:
            cached = self._recent.get(image.digest, self._unwritten.get(image.digest))
        if cached is not None:
            return cached
        file = (self._directory or Path(os.devnull)) / f"{image.digest}.png"
        try:
            with PIL.Image.open(file, formats=["PNG"]) as opened:
                pixels = np.asarray(opened.convert("RGB"), np.uint8)
        except (OSError, ValueError) as error:
            raise DataError(f"The image {file} cannot be read: {error}.") from error
        if _digest(pixels) != image.digest:
            raise DataError(f"The image {file} is not the one that its name says. Restore the file.")
        self._remember(image.digest, pixels)
        return pixels

    def png(self, image: Image) -> bytes:
        pixels_HWC = self.pixels(image)
        file = self._directory / f"{image.digest}.png" if self._directory else None
        if file is not None and file.exists():
            return file.read_bytes()
        buffer = io.BytesIO()
        PIL.Image.fromarray(pixels_HWC).save(buffer, format="PNG")
        return buffer.getvalue()

    def _remember(self, digest: str, pixels: Pixels) -> None:
        self._write()
        with self._lock:
            self._recent[digest] = pixels
            self._recent.move_to_end(digest)
            while len(self._recent) > KEPT:
                self._recent.popitem(last=False)

    def _write(self) -> None:
        if not self._unwritten or self._directory is None or (self._begun and not self._begun.exists()):
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        for digest, pixels in list(self._unwritten.items()):
            file = self._directory / f"{digest}.png"
            if not file.exists():
                beside = file.with_name(f".{digest}.{os.getpid()}.{secrets.token_hex(4)}")
                PIL.Image.fromarray(pixels).save(beside, format="PNG")
                beside.replace(file)
            self._unwritten.pop(digest, None)


def _digest(pixels_HWC: Pixels) -> str:
    height, width, _ = pixels_HWC.shape
    return hashlib.sha256(f"{height}x{width}:".encode() + pixels_HWC.tobytes()).hexdigest()


def _picture(value: Any, directory: Path | None) -> Picture:
    if isinstance(value, Picture):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Picture(bytes(value))
    if isinstance(value, Mapping):  # of Arrow, or of OpenAI
        stored = (value[key] for key in ("bytes", "path", "url", "image") if value.get(key) is not None)
        if (item := next(stored, None)) is not None:
            return _picture(item, directory)
    elif isinstance(value, str):
        return _of_text(value, directory)
    elif hasattr(value, "save") and hasattr(value, "mode"):  # an image of Pillow
        file = io.BytesIO()
        value.save(file, format="PNG")
        return Picture(file.getvalue())
    raise DataError(f"an image cannot be {value!r:.60}. Accepted: bytes, a data URI, base64 text, or a path.")


def _of_text(text: str, directory: Path | None) -> Picture:
    try:
        if text.startswith("data:") or is_encoded(text):
            return Picture(base64.b64decode(text.rpartition(",")[2], validate=True))
        if "://" in text[:12]:
            raise DataError(f"the image {text[:80]!r} is an address, and nothing is downloaded.")
        if directory is not None:
            file = (directory / text).resolve()
            # a pipe would wait for ever
            if (
                file.is_relative_to(directory.resolve())
                and file.is_file()
                and file.stat().st_size <= MAX_BYTES
            ):
                return Picture(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"the image {text[:80]!r} is not base64 or cannot be read: {error}.") from error
    raise DataError(
        f"the image {text[:80]!r} is a path, but not of a file below that of the data, of at most {MAX_BYTES:,} bytes."
    )


def _opened(picture: Picture) -> Any:
    """Return an image of Pillow whose header was read and is within the limits."""
    if len(picture.data) > MAX_BYTES:
        raise DataError(f"the image has {len(picture.data):,} bytes. Accepted: at most {MAX_BYTES:,}.")
    try:
        image = PIL.Image.open(io.BytesIO(picture.data), formats=FORMATS)
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise DataError(f"the image is no {', '.join(FORMATS)} file: {picture.data[:12]!r}...") from error
    frames = getattr(image, "n_frames", 1)
    if image.width * image.height > MAX_PIXELS or max(image.size) > MAX_SIDE or frames > 1:
        raise DataError(
            f"the image has {image.width} x {image.height} pixels and {frames} frames. Accepted: {MAX_PIXELS:,} pixels, "
            f"{MAX_SIDE:,} a side, and one frame."
        )
    return image
