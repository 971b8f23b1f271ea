"""What `rl4llm plan` says of images: the tower that computes them, what is kept of them, and their tokens in rows."""

import base64
import copy
import io
import json
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
from test_plan import WITHIN, measured
from tiny_vision import build_vision_model, build_vision_tokenizer, save_vision_model
from transformers import Qwen3VLForConditionalGeneration
from vision_models import TEXTS, vision_directories, vision_directory  # noqa: F401 - fixtures
from vision_models import vision_of as vision_of_files

from rl4llm.compose import supervised
from rl4llm.compose.data import longest_rows
from rl4llm.compose.models import vision_of
from rl4llm.config import load_config
from rl4llm.core.errors import DataError
from rl4llm.data.images import read_picture
from rl4llm.extensions.inspect.check.machine import _needed
from rl4llm.extensions.inspect.plan import memory
from rl4llm.extensions.inspect.plan.advice import changes
from rl4llm.extensions.inspect.plan.plan import make_plan
from rl4llm.extensions.inspect.plan.shape import read_tower
from rl4llm.extensions.inspect.plan.show import tables

SIDE = 32  # pixels of a token


def picture(rows, columns, seed=0):
    """Return an image of rows x columns tokens, as a data URI."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * SIDE, columns * SIDE, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model whose image side is larger than its text model."""
    directory = tmp_path_factory.mktemp("seeing") / "model"
    directory.mkdir()
    tokenizer = build_vision_tokenizer(TEXTS)
    config = copy.deepcopy(build_vision_model(tokenizer, 5, hidden_size=320, num_layers=5).config)
    vision = config.vision_config
    vision.depth, vision.hidden_size, vision.intermediate_size, vision.num_heads = 4, 320, 1280, 5
    save_vision_model(Qwen3VLForConditionalGeneration(config), tokenizer, directory)
    return directory


def written(directory, rows):
    directory.mkdir()
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory)


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """Return the configurations of runs with a tower that is frozen and one that trains, and the memory they took."""
    root = tmp_path_factory.mktemp("measured")
    rows = [{"prompt": "<image>?", "image": picture(8, 8, seed), "ground_truth": "a"} for seed in range(8)]
    own = {
        "model.path": str(model), "data.path": written(root / "rows", rows), "model.autocast": "none", "eval.every": 0,
        "rewards": [{"name": "length", "unit": "chars", "max_length": 1, "margin": 400}], "rollout.prompts": 4,
        "rollout.group_size": 4, "rollout.max_tokens": 16, "training.lr": 1e-3, "threads": 1,
        "tracking.tensorboard": False, "tracking.episodes_every": 0,
    }  # fmt: skip
    kinds = {
        name: {**own, "model.vision": vision, "max_steps": steps, "output.dir": str(root / name)}
        for name, vision, steps in (("warm", "train", 1), ("frozen", "frozen", 2), ("train", "train", 2))
    }
    return measured(kinds, root / "took.json")


@pytest.mark.parametrize("vision", ["frozen", "train"])
def test_the_peak_of_a_plan_with_images_is_that_of_the_run(runs, vision):
    config, took = runs[vision]
    planned = make_plan(config).peak.total
    assert abs(planned - took) <= WITHIN * took, (
        f"planned {planned / 2**20:.0f} MiB, took {took / 2**20:.0f} MiB"
    )


def test_the_measured_runs_can_tell_how_the_tower_is_planned(runs):
    frozen, train = (make_plan(config).peak.total for config, _ in (runs["frozen"], runs["train"]))
    assert frozen < (1 - WITHIN) * runs["train"][1] and train > (1 + WITHIN) * runs["frozen"][1]


@pytest.fixture
def config(model, tmp_path):
    """config(**keys): prompts of text, of 49 and of 64 tokens of an image."""
    said = "the colour of the picture is red or green or blue. " * 4
    rows = [{"prompt": said, "ground_truth": "a"}]
    rows += [
        {"prompt": "<image>?", "image": picture(size, size, size), "ground_truth": "a"} for size in (7, 8)
    ]
    own = {
        "model.path": str(model), "model.vision": "frozen", "data.path": written(tmp_path / "rows", rows),
        "rewards": [{"name": "length", "unit": "chars", "max_length": 1, "margin": 400}], "eval.every": 0,
        "rollout.prompts": 2, "rollout.group_size": 3, "rollout.max_tokens": 8, "model.device": "cpu",
        "model.autocast": "none", "output.dir": str(tmp_path / "run"),
    }  # fmt: skip
    return lambda **keys: load_config(
        None, own | {name.replace("__", "."): key for name, key in keys.items()}
    )


def test_images_are_counted_by_their_tokens(config):
    plan = make_plan(config())
    counts, tower = plan.counts, plan.models.tower
    assert (counts.image_tokens, counts.seen_tokens) == (64, 2 * 64)  # two prompts are in a micro-batch
    assert 64 < counts.prompt_tokens < 64 + 30
    shown = dict(zip(*(column.cells for column in next(iter(tables(plan))).columns), strict=True))
    assert shown["of them images"] == "64"
    parts = plan.phases[-1].parts
    assert tower.features == 3 * 320  # of the first embeddings, and of two layers behind them
    assert parts["features of images"] == 3 * 64 * tower.features * 4
    assert parts["pixels of images"] == 3 * 64 * SIDE * SIDE * 3
    assert parts["image towers"] == tower.layers.parameters * 4


def test_a_token_of_an_image_takes_what_the_processor_makes(vision_directory):  # noqa: F811
    tower, vision = read_tower(str(vision_directory)), vision_of_files(vision_directory)
    (place,) = vision.probe()[1]
    image, tokens = place.image, place.length
    pixels = vision.inputs([vision.store.pixels(image)])["pixel_values"]
    assert tokens * tower.inputs == pixels.numel() * 4
    assert tokens * tower.pixels == image.height * image.width * 3


def test_features_that_are_kept_have_a_limit(config, monkeypatch):
    monkeypatch.setattr(memory, "FEATURE_BYTES", 1000)
    plan = make_plan(config())
    assert plan.phases[-1].parts["features of images"] == 2 * 64 * plan.models.tower.features * 4


def test_a_tower_counts_once_for_each_model_that_has_one(config):
    def phases(**keys):
        plan = make_plan(config(**keys))
        return plan.models.tower.layers.parameters * 4, {phase.name: phase.parts for phase in plan.phases}

    size, frozen = phases()
    _, train = phases(model__vision="train")
    assert train["update"]["weights"] == frozen["update"]["weights"] + size
    assert train["update"]["optimizer"] == frozen["update"]["optimizer"] + 2 * size
    assert "image towers" not in train["update"] and "features of images" not in train["update"]
    kl = {"algorithm": {"name": "grpo", "kl_coef": 0.1}}
    _, two = phases(**kl)
    assert two["update"]["image towers"] == 2 * size
    assert two["start"]["weights of all models"] == 2 * frozen["start"]["weights of all models"]
    _, both = phases(**kl, model__vision="train")
    assert both["update"]["reference"] == two["update"]["reference"] + size
    server = {"inference": {"name": "sglang", "cohost": True}}
    _, served = phases(**server)
    _, taught = phases(**server, model__vision="train")
    assert (
        served["rollout"]["server's weights"]
        == taught["rollout"]["server's weights"]
        == (train["update"]["weights"])
    )
    assert served["rollout"]["image towers"] == size  # it never leaves the device


def test_the_longest_rows_are_found_by_their_images(config, monkeypatch):
    own = config()
    vision, text = vision_of(own), "x" * 200
    seen = [{"messages": [{"role": "user", "content": "", "parts": [read_picture(picture(8, 8))]}]}]
    rows = [{"messages": [{"role": "user", "content": text}]}, *seen]
    assert longest_rows(rows, 1, vision=vision) == seen
    assert longest_rows(rows, 1) == rows[:1]


def test_a_conversation_too_long_by_its_image_is_found(model, tmp_path, monkeypatch):
    monkeypatch.setattr(supervised, "PATIENCE", 1)
    rows = [{"prompt": "is it red or green? " * 2, "completion": "red"}] * 3
    rows.insert(1, {"prompt": "<image>?", "image": picture(4, 4), "completion": "red"})
    rows.insert(2, {"prompt": "<image>?", "image": picture(8, 8), "completion": "red"})
    keys = {
        "model.path": str(model), "model.vision": "frozen", "algorithm.name": "sft", "eval.every": 0,
        "data.path": written(tmp_path / "rows", rows), "rollout.prompts": 2, "output.dir": str(tmp_path / "run"),
    }  # fmt: skip
    counts = make_plan(load_config(None, keys)).counts
    assert (counts.image_tokens, counts.seen_tokens) == (64, 64 + 16)
    with pytest.raises(DataError, match=r"train\.jsonl:3"):
        make_plan(load_config(None, keys | {"inference.context_length": 60}))


def test_a_tower_that_does_not_fit_may_be_frozen(config):
    plan = make_plan(config(model__vision="train"))
    smaller = replace(plan, memory=plan.peak.total - 1)
    assert ("model.vision=frozen",) in [change.overrides for change in changes(smaller) if change.fits]


def test_the_disk_holds_a_tower_that_trains_with_its_moments(config):
    own, taught = config(checkpoint__keep=1), config(checkpoint__keep=1, model__vision="train")
    size = make_plan(own).models.tower.layers.parameters * 4
    assert _needed(taught, served=False) == _needed(own, served=False) + 2 * 3 * size
    plain = replace(own, model=replace(own.model, vision="none"))
    assert _needed(own, served=False) == _needed(plain, served=False) + size  # of the trained model
