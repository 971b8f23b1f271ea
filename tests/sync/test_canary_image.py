"""A canary that looks at an image finds an engine that sees another one."""

import asyncio

import pytest
import torch
from sweeps import sampled
from vision_families import FAMILIES
from vision_models import seeing_model, vision_of

from rl4llm.backends.models import load_tokenizer
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import StaleWeightsError
from rl4llm.core.images import tower_of
from rl4llm.core.weights import WeightRef
from rl4llm.inference.local import LocalClient
from rl4llm.sync.verify import Canary, CanaryImage

REF = WeightRef(1)
TEXT_SAMPLE = ("qwen3_vl", "gemma3")  # these tests are about the text


@pytest.fixture
def sides(vision_directory, tmp_path):
    """Return a trainer and an engine with equal weights, and the image for a canary."""
    vision = vision_of(vision_directory, tmp_path / "images")
    backend = TorchBackend(seeing_model(vision_directory, vision), lr=1e-3)
    engine = LocalClient(seeing_model(vision_directory, vision), load_tokenizer(vision_directory))
    asyncio.run(engine.load(REF))
    return backend, engine, CanaryImage(vision)


def verify(backend, engine, image):
    canary = Canary(engine.vocab_size, dtype="float32", image=image)
    canary.token_ids_BT = asyncio.run(canary.sample(engine))
    return asyncio.run(canary.verify(backend, engine, REF))


def test_canary_with_an_image_passes_equal_sides(sides):
    assert verify(*sides) < 1e-5


def test_canary_finds_other_features(sides):
    backend, engine, image = sides
    tower = tower_of(engine._model)
    tower.features([image.places[0].image], torch.device("cpu"))
    for features in tower._kept.values():
        features += 0.5
    assert verify(backend, engine, None) < 1e-5  # text alone does not show it
    with pytest.raises(StaleWeightsError):
        verify(backend, engine, image)


@pytest.mark.parametrize("vision_directory", sampled(FAMILIES, TEXT_SAMPLE), indirect=True)
def test_canary_finds_an_engine_with_old_text_weights(sides):
    backend, engine, image = sides
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.mul_(1.1)
    with pytest.raises(StaleWeightsError):
        verify(backend, engine, image)


@pytest.mark.parametrize("vision_directory", sampled(FAMILIES, TEXT_SAMPLE), indirect=True)
def test_text_canary_has_the_same_tokens_as_ever(sides):
    _, engine, image = sides
    plain, shown = (Canary(engine.vocab_size, dtype="float32", image=given) for given in (None, image))
    assert plain.token_ids_BT.shape == (2, 24)
    assert shown.token_ids_BT.shape == (3, 24 + len(image.token_ids))
    assert shown.token_ids_BT[-1, : len(image.token_ids)].tolist() == image.token_ids
