"""Tiny vision-language models of two families as directories, images, and trajectories with images in several turns."""

import numpy as np
import pytest

from rl4llm.backends.tiny_vision import (
    PATCHES,
    build_vision_model,
    build_vision_tokenizer,
    save_vision_model,
)

FAMILIES = tuple(PATCHES)
TEXTS = ["the colour of the picture is red or green or blue", "how many dots are there? 1 2 3 4"]


@pytest.fixture(scope="session")
def vision_directories(tmp_path_factory):
    """Return the directory of a tiny model of each family."""
    tokenizer = build_vision_tokenizer(TEXTS)
    found = {}
    for family in FAMILIES:
        found[family] = tmp_path_factory.mktemp("vision") / family
        found[family].mkdir()
        save_vision_model(build_vision_model(tokenizer, 5, family), tokenizer, found[family])
    return found


@pytest.fixture(params=FAMILIES)
def vision_directory(request, vision_directories):
    return vision_directories[request.param]


def picture(family, rows, columns, seed):
    """Return random pixels (H, W, 3) that become rows x columns tokens."""
    side = 2 * PATCHES[family]
    return np.random.default_rng(seed).integers(0, 256, (rows * side, columns * side, 3), dtype=np.uint8)
