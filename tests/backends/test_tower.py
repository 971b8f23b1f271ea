"""Images in the trainer: every layout of a batch gives the numbers and gradients of the family's own forward."""

import shutil
from dataclasses import replace

import pytest
import torch
from packed import pack
from sweeps import sampled
from vision_families import BOTH_WAYS, FAMILIES, GRIDS, change
from vision_models import picture, plain_logprobs, seeing_model, vision_of, whole_model

from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.backends.tower import add_tower
from rl4llm.core.errors import ConfigError, ModelError
from rl4llm.core.images import tower_of
from rl4llm.core.types import TokenSpan, images_of
from rl4llm.data.layouts import LAYOUTS
from rl4llm.data.pack import totals_of
from rl4llm.data.plan import is_computed

TRAINS = [pytest.param(False, id="frozen"), pytest.param(True, id="train")]
SIZES = [pytest.param(10_000, id="one batch"), pytest.param(40, id="also batches without images")]


def packed(trajectories, vision, layout="shared", size=10_000):
    return pack(
        trajectories, [1.0, -0.5, 2.0, 1.0, -1.0, 0.5][: len(trajectories)], max_tokens_per_batch=size, layout=layout,
        aggregation="token", totals=totals_of(trajectories), pad_token_id=0, positions=vision and vision.positions,
    )  # fmt: skip


def by_record(batches, numbers):
    """Return the number of each policy token, by record and place."""
    found = {}
    for batch, numbers_BT in zip(batches, numbers, strict=True):
        for row, column in batch.mask_BT.nonzero().tolist():
            key = int(batch.record_ids_BT[row, column]), int(batch.position_ids_BT[row, column])
            found[key] = numbers_BT[row, column]
    return found


def expected_of(whole, vision, trajectories):
    found = {}
    for number, one in enumerate(trajectories):
        logprobs = plain_logprobs(whole, vision, one.token_ids, images_of(one.spans))
        place = 0
        for span in one.spans:
            for _ in span.token_ids:
                if span.author == "policy":
                    found[number, place] = logprobs[place - 1]
                place += 1
    return found


def apart(found, expected):
    assert found.keys() == expected.keys()
    return max(float((found[key] - expected[key]).abs()) for key in found)


def of_text(name):
    """Whether a tensor of the whole model is one of the text model."""
    return "language_model" in name or "lm_head" in name


@pytest.fixture
def expected(seen):
    directory, vision, trajectories = seen
    with torch.no_grad():
        return expected_of(whole_model(directory), vision, trajectories)


@pytest.mark.parametrize("streams", [True, False], ids=["one row", "padded rows"])
def test_every_layout_gives_the_familys_logprobs(seen, expected, streams):
    directory, vision, trajectories = seen
    backend = TorchBackend(seeing_model(directory, vision), lr=1e-3)
    both_ways = any("in both directions" in warning for warning in backend.warnings())
    assert backend.runner.streams != both_ways == (directory.name in BOTH_WAYS)
    backend.runner.streams &= streams
    for layout in LAYOUTS:
        for size in (10_000, 40):  # all in one micro-batch; some with images, some without
            batches = packed(trajectories, vision, layout, size)
            assert (len(batches) > 2) == (size == 40)
            found = by_record(batches, [backend.forward(batch) for batch in batches])
            assert apart(found, expected) < 1e-5, (layout, size)


def seen_by(ranks, directory, images, batch):
    """Return what one of the ranks that share a model computes."""
    model = load_model(directory, shared_by=ranks)
    add_tower(model, directory, vision_of(directory, images), ranks)
    return TorchBackend(model, ranks=ranks, shard="fsdp2", device="cpu").forward(batch)


@pytest.mark.parametrize("vision_directory", ["internvl", "gemma3"], indirect=True)
def test_ranks_that_share_a_model_see_the_same(seen, expected, on_ranks, tmp_path):
    directory, vision, trajectories = seen
    (batch,) = packed(trajectories, vision)
    for found in on_ranks(seen_by, directory, tmp_path / "images", batch):
        assert apart(by_record([batch], [found]), expected) < 1e-5


@pytest.mark.parametrize("trains", sampled(TRAINS, [TRAINS[1]]))
@pytest.mark.parametrize("size", sampled(SIZES, [SIZES[1]]))
def test_gradients_are_those_of_the_familys_forward(seen, trains, size):
    directory, vision, trajectories = seen
    model, whole = seeing_model(directory, vision, trains=trains), whole_model(directory)
    batches = packed(trajectories, vision, size=size)
    backend = TorchBackend(model, lr=1e-3)
    for batch in batches:
        backend.forward_backward(batch, lambda batch, logprobs_BT, _: (-batch.credits_BT * logprobs_BT, {}))
    weights = by_record(batches, [batch.credits_BT * batch.weights_BT for batch in batches])
    plain = expected_of(whole, vision, trajectories)
    sum(-weights[key] * plain[key] for key in plain).backward()
    own = dict(model.named_parameters())
    theirs = {
        name.replace("model.language_model.", "model.")
        if of_text(name)
        else name.replace("model.", "image_side.", 1): parameter.grad
        for name, parameter in whole.named_parameters()
        if trains or of_text(name)
    }
    assert own.keys() == theirs.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    for name, parameter in own.items():
        assert torch.allclose(parameter.grad, theirs[name], atol=1e-5 * largest), name


@pytest.mark.parametrize("vision_directory", sorted({*FAMILIES} - {*BOTH_WAYS}), indirect=True)
def test_text_in_a_model_that_sees_images_is_bit_equal(seen):
    directory, vision, trajectories = seen
    blind, sighted = load_model(directory, device="cpu"), seeing_model(directory, vision)
    (batch,) = packed(trajectories[4:], None)
    assert batch.axes_BTA is batch.feature_ids_BT is None and batch.images == ()
    assert torch.equal(
        TorchBackend(blind, lr=1e-3).forward(batch), TorchBackend(sighted, lr=1e-3).forward(batch)
    )


def test_same_tokens_with_another_image_give_other_logprobs(seen):
    directory, vision, trajectories = seen
    backend = TorchBackend(seeing_model(directory, vision), lr=1e-3)
    (batch,) = packed(trajectories[1:2], vision)
    first = trajectories[1].spans[0]
    places = tuple(
        replace(place, image=vision.store.add(255 - vision.store.pixels(place.image)))
        for place in first.images
    )
    other = replace(trajectories[1], spans=(replace(first, images=places), *trajectories[1].spans[1:]))
    (another,) = packed([other], vision)
    assert torch.equal(batch.token_ids_BT, another.token_ids_BT)
    assert (backend.forward(batch) - backend.forward(another)).abs().max() > 0.01


def test_samples_with_another_image_share_what_is_before_it(seen):
    _, vision, trajectories = seen
    first = trajectories[1].spans[0]
    places = tuple(
        replace(place, image=vision.store.add(255 - vision.store.pixels(place.image)))
        for place in first.images
    )
    other = replace(trajectories[1], spans=(replace(first, images=places), *trajectories[1].spans[1:]))
    (batch,) = packed([trajectories[1], other], vision)
    assert is_computed(batch).sum() == 2 * trajectories[1].num_tokens - places[0].offset


def test_each_image_is_computed_once(seen, monkeypatch):
    directory, vision, trajectories = seen
    model = seeing_model(directory, vision)
    backend = TorchBackend(model, lr=1e-3)
    asked = []
    monkeypatch.setattr(
        vision.store, "pixels", lambda image, own=vision.store.pixels: asked.append(image) or own(image)
    )
    for batch in packed(trajectories, vision, size=40) * 2:
        backend.forward(batch)
    assert len(asked) == len(set(asked)) == 4


@pytest.mark.parametrize("deterministic", sampled([False, True], [False]))
def test_missing_images_are_computed_together(seen, monkeypatch, deterministic):
    directory, vision, _ = seen
    images = [vision.store.add(picture(directory.name, 8, 8, seed)) for seed in range(1, 19)]
    images.insert(3, images[1])
    monkeypatch.setattr("rl4llm.backends.tower.TOGETHER", 16 * vision.tokens(images[0]))
    towers = [tower_of(seeing_model(directory, vision)) for _ in range(2)]
    calls = []
    own = towers[0]._computed
    monkeypatch.setattr(
        towers[0], "_computed", lambda some, device: calls.append(len(some)) or own(some, device)
    )
    device = torch.device("cpu")
    alone = torch.cat([towers[1].features([image], device) for image in images])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    assert (towers[0].features(images, device) - alone).abs().max() < 1e-5
    assert calls == ([1] * 18 if deterministic else [16, 2])
    assert torch.equal(
        towers[0].features(images[:2], device),
        towers[0].features(images, device)[: 2 * vision.tokens(images[0])],
    )
    assert len(calls) == (18 if deterministic else 2)  # the rest was kept


@pytest.mark.parametrize("trains", sampled(TRAINS, [TRAINS[1]]))
def test_image_side_is_exported_as_it_trained(seen, tmp_path, trains):
    directory, vision, trajectories = seen
    backend = TorchBackend(seeing_model(directory, vision, trains=trains), lr=1e-2)
    (batch,) = packed(trajectories, vision)
    backend.forward_backward(batch, lambda batch, logprobs_BT, _: (-batch.credits_BT * logprobs_BT, {}))
    backend.optim_step()
    backend.export(tmp_path / "out")
    before, after = whole_model(directory).state_dict(), whole_model(tmp_path / "out").state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == (set() if trains else {name for name in before if not of_text(name)})
    with torch.no_grad():
        expected = expected_of(whole_model(tmp_path / "out"), vision, trajectories)
    assert apart(by_record([batch], [backend.forward(batch)]), expected) < 1e-5


@pytest.mark.parametrize("vision_directory", GRIDS, indirect=True)
def test_positions_that_are_not_the_familys_are_refused(seen, monkeypatch):
    directory, vision, _ = seen
    monkeypatch.setattr(vision, "positions", lambda length, places, own=vision.positions: own(length, ()))
    with pytest.raises(ModelError):
        seeing_model(directory, vision)


@pytest.mark.parametrize("vision_directory", ["internvl"], indirect=True)
def test_another_number_of_tokens_is_refused(vision_directory, tmp_path):
    directory = shutil.copytree(vision_directory, tmp_path / "changed")
    change(directory / "config.json", {"image_seq_length": 5})
    with pytest.raises(ModelError):
        seeing_model(directory, vision_of(directory))


def test_images_are_refused_by_a_model_that_sees_none(seen):
    directory, vision, trajectories = seen
    with pytest.raises(ConfigError):
        packed(trajectories, None)
    (batch,) = packed(trajectories, vision)
    with pytest.raises(ModelError):
        TorchBackend(load_model(directory, device="cpu"), lr=1e-3).forward(batch)


def test_batches_carry_their_images_where_they_go(seen):
    _, vision, trajectories = seen
    (batch,) = packed(trajectories, vision)
    moved = batch.to("cpu")
    assert moved.images == batch.images and len(moved.images) == 4
    assert torch.equal(moved.feature_ids_BT, batch.feature_ids_BT)
    shown = (batch.feature_ids_BT >= 0) & ~batch.mask_BT
    assert torch.equal(shown, batch.feature_ids_BT >= 0)
    assert isinstance(trajectories[0].spans[1], TokenSpan)
    assert vision.placeholder in trajectories[0].spans[1].token_ids  # which the policy sampled
