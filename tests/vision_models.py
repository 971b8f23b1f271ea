"""Tiny vision-language models of two families as directories, images, and trajectories with images in several turns."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rl4llm.backends.models import load_model
from rl4llm.backends.tiny_vision import (
    PATCHES,
    build_vision_model,
    build_vision_tokenizer,
    save_vision_model,
)
from rl4llm.backends.tower import add_tower
from rl4llm.core.images import ImagePlace
from rl4llm.core.types import TokenSpan, Trajectory
from rl4llm.data.images import ImageStore
from rl4llm.data.vision import Vision

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


def whole_model(directory):
    """Return the family's own class with all weights."""
    return AutoModelForImageTextToText.from_pretrained(directory).eval()


def vision_of(directory, images=None):
    return Vision(directory, ImageStore(images))


def seeing_model(directory, vision, *, trains=False):
    """Return the text model with the image side beside it."""
    model = load_model(directory, device="cpu")
    add_tower(model, directory, vision, trains=trains)
    return model


def plain_logprobs(whole, vision, token_ids, places=()):
    """Return the log-prob of each token after the first by a forward of the family's class.

    That class takes every placeholder for an image. One that the policy sampled gets its own embedding as its feature.
    """
    ids_BT = torch.tensor([token_ids])
    marks_BT = torch.zeros_like(ids_BT)
    features, later = [], []
    for place in places:
        marks_BT[0, place.offset : place.end] = 1
    options = {}
    if places:
        made = vision.inputs([vision.store.pixels(place.image) for place in places])
        output = whole.get_image_features(**made)
        shown = torch.cat(list(output.pooler_output))
        deep = [torch.cat(list(layer)) for layer in getattr(output, "deepstack_features", None) or ()]
        taken = 0
        for at in (ids_BT[0] == vision.placeholder).nonzero()[:, 0].tolist():
            if marks_BT[0, at]:
                features.append(shown[taken])
                later.append([layer[taken] for layer in deep])
                taken += 1
            else:
                features.append(whole.get_input_embeddings()(ids_BT[0, at]))
                later.append([torch.zeros_like(layer[0]) for layer in deep])
        output.pooler_output = (torch.stack(features),)
        if deep:
            output.deepstack_features = [(torch.stack(layer),) for layer in zip(*later, strict=True)]
        options = {"mm_encoder_outputs": {"image": output}, "image_grid_thw": made["image_grid_thw"]}
    logits = whole(
        input_ids=ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        mm_token_type_ids=marks_BT,
        use_cache=False,
        **options,
    ).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids_BT[0, 1:, None])[:, 0]


@pytest.fixture
def seen(vision_directory, tmp_path):
    """Return the directory of a model, its `Vision` and trajectories of groups with images.

    Two samples share a prompt with two images, and get a third in turn 2; the policy sampled a placeholder. Two have another
    prompt, one of them an image in turn 2. Two have no image.
    """
    family = vision_directory.name
    vision = vision_of(vision_directory, tmp_path / "images")
    sizes = [(2, 3), (1, 2), (3, 1), (2, 2)]
    images = [vision.store.add(picture(family, *size, seed)) for seed, size in enumerate(sizes, 1)]
    generator = torch.Generator().manual_seed(2)

    def text(count):
        return torch.randint(5, 280, (count,), generator=generator).tolist()

    def context(*parts):
        token_ids, places = [], []
        for part in parts:
            if isinstance(part, int):
                token_ids += text(part)
            else:
                length = vision.tokens(part)
                places.append(ImagePlace(part, len(token_ids), length))
                token_ids += [vision.placeholder] * length
        return TokenSpan.context(token_ids, places)

    def policy(*token_ids):
        return TokenSpan(token_ids, "policy", tuple(-1.0 for _ in token_ids), 0)

    both, other, plain = context(3, images[1], 2, images[0], 4), context(2, images[2], 3), context(6)
    records = [
        (
            "a",
            (
                both,
                policy(*text(4), vision.placeholder, *text(2)),
                context(1, images[2], 2),
                policy(*text(3)),
            ),
        ),
        ("a", (both, policy(*text(5)))),
        ("b", (other, policy(*text(3)), context(2, images[3], 1, images[0], 3), policy(*text(4)))),
        ("b", (other, policy(*text(6)), context(3), policy(*text(2)))),
        ("c", (plain, policy(*text(4)), context(2), policy(*text(3)))),
        ("c", (plain, policy(*text(7)))),
    ]
    trajectories = [Trajectory(name, spans, (), {}, 0.0, "stop") for name, spans in records]
    return vision_directory, vision, trajectories
