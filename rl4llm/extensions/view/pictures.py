"""Small copies of a run's images, for the page; loaded only for episodes with images."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import PIL.Image

SIDE = 256  # pixels, at most


def small_copies(directory: Path, digests: Sequence[str]) -> dict[str, str]:
    """Return a data URI for each of these images whose file can be read."""
    uris = {}
    for digest in dict.fromkeys(digests):
        try:
            with PIL.Image.open(directory / f"{digest}.png", formats=["PNG"]) as image:
                image.thumbnail((SIDE, SIDE))
                file = io.BytesIO()
                image.save(file, format="PNG")
        except (OSError, ValueError, PIL.Image.DecompressionBombError):
            continue
        uris[digest] = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return uris
