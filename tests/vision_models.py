"""Tiny vision-language models as directories, images, and trajectories with images in several turns."""

import inspect

import numpy as np
import pytest
import torch
from sweeps import sampled
from tiny_vision import build_vision_tokenizer
from transformers import AutoModelForImageTextToText
from vision_families import BOTH_WAYS, FAMILIES, GRIDS, SIDE, write

from rl4llm.backends.models import load_model
from rl4llm.backends.tower import add_tower
from rl4llm.core.images import ImagePlace
from rl4llm.core.types import TokenSpan, Trajectory
from rl4llm.data.images import ImageStore
from rl4llm.data.vision import Vision

TEXTS = ["the colour of the picture is red or green or blue", "how many dots are there? 1 2 3 4"]


class Directories(dict):
    """The directories of a tiny model of each family, each written when it is first asked for."""

    def __init__(self, root):
        super().__init__()
        self._root, self._tokenizer = root, build_vision_tokenizer(TEXTS)

    def __missing__(self, family):
        self[family] = self._root / family
        write(family, self._tokenizer, self[family])
        return self[family]


@pytest.fixture(scope="session")
def vision_directories(tmp_path_factory):
    return Directories(tmp_path_factory.mktemp("vision"))


@pytest.fixture(params=FAMILIES)
def vision_directory(request, vision_directories):
    return vision_directories[request.param]


@pytest.fixture(name="vision_directory", params=sampled(FAMILIES, lambda family: family != "qwen2_5_vl"))
def some_vision_directory(request, vision_directories):
    """Leave the family that real servers run to a sweep, where tests build its model."""
    return vision_directories[request.param]


def picture(family, rows, columns, seed):
    """Return random pixels (H, W, 3) that become rows x columns tokens, or the one size of a family."""
    side = GRIDS.get(family, 0)
    size = (rows * side, columns * side) if side else (SIDE, SIDE)
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


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
        whole_features = torch.stack(features)[None]
        output.pooler_output = (
            whole_features if isinstance(output.pooler_output, torch.Tensor) else tuple(whole_features)
        )
        if deep:
            output.deepstack_features = [(torch.stack(layer),) for layer in zip(*later, strict=True)]
        options = {"mm_encoder_outputs": {"image": output}} | made
        del options["pixel_values"]
    accepted = inspect.signature(whole.forward).parameters
    marks = {name: marks_BT for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
    logits = whole(
        input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False, **marks, **options
    ).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids_BT[0, 1:, None])[:, 0]


@pytest.fixture
def seen(vision_directory, tmp_path):
    """Return the directory of a model, its `Vision` and trajectories of groups with images.

    Two samples share a prompt with two images; one gets the second again in turn 2, and its policy sampled a placeholder.
    Two have another prompt, one of them two adjacent images in what a tool answers. Two have no image.
    """
    family = vision_directory.name
    vision = vision_of(vision_directory, tmp_path / "images")
    # Where the family's class takes a run of placeholders for one image, a token stands between images.
    between = int(vision.axes > 1 or family in BOTH_WAYS)
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
                context(1, images[0], 2),
                policy(*text(3)),
            ),
        ),
        ("a", (both, policy(*text(5)))),
        ("b", (other, policy(*text(3)), context(2, images[3], between, images[0], 3), policy(*text(4)))),
        ("b", (other, policy(*text(6)), context(3), policy(*text(2)))),
        ("c", (plain, policy(*text(4)), context(2), policy(*text(3)))),
        ("c", (plain, policy(*text(7)))),
    ]
    trajectories = [Trajectory(name, spans, (), {}, 0.0, "stop") for name, spans in records]
    return vision_directory, vision, trajectories
