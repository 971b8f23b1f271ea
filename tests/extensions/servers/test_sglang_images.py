"""Images through the real SGLang."""

import pytest
from server_images import (
    CONTEXT,
    SAMPLED,
    Seer,
    check_adapter_trains,
    check_counts,
    check_new_tower,
    check_restart,
    check_samples_and_scores,
    check_tower_trains,
    families,
    write_model,
)
from vision_models import seeing_model

from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import StaleWeightsError, UnreadableError
from rl4llm.extensions.servers.clients.images import UNNAMED
from rl4llm.extensions.servers.launch import launch
from rl4llm.sync.verify import Canary, CanaryImage

pytestmark = pytest.mark.sglang
FAMILY = "qwen2_5_vl"


def server(directory, python):
    adapters = ["--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", "all"]
    flags = ["--model-path", str(directory), "--context-length", str(CONTEXT), "--port", "0", *adapters]
    return launch("sglang", [*flags, "--enable-multimodal"], python=python, cpu=True, ready_within_s=400)


@pytest.fixture(scope="module", params=families(FAMILY))
def seer(request, tmp_path_factory, sglang_python):
    directory = write_model(tmp_path_factory.mktemp("sglang"), request.param)
    with server(directory, sglang_python) as running, Seer("sglang", running.url, directory) as seer:
        yield seer


def test_images_are_sampled_and_scored_as_by_a_forward(seer):
    check_samples_and_scores(seer)


@pytest.fixture
def named(seer):
    """Return the server of a family whose features have names, as a tower that trains needs."""
    if seer.vision.config.model_type in UNNAMED:
        pytest.skip("in this family a tower that trains is refused")
    return seer


def test_an_image_seen_before_is_seen_by_the_new_tower(named, tmp_path):
    check_new_tower(named, tmp_path)


def test_the_canary_finds_features_of_the_tower_before(named, tmp_path, monkeypatch):
    names = "rl4llm.extensions.servers.clients.sglang.feature_name"
    monkeypatch.setattr(names, lambda image, weights: image.digest)
    canary = Canary(named.client.vocab_size, dtype="float32", image=CanaryImage(named.vision))

    def verify(path):
        ref = named.load(path)
        backend = TorchBackend(seeing_model(path, named.vision), lr=1e-3)
        named.run(canary.verify(backend, named.client, ref))

    verify(named.directory)
    with pytest.raises(StaleWeightsError):
        verify(named.write_changed(tmp_path))


def test_an_image_of_another_number_of_tokens_is_refused(seer):
    check_counts(seer)


def test_a_placeholder_that_is_not_an_image_is_refused(seer):
    ids, places = seer.prompt([5], 0, [40])
    for token in seer.vision.media:
        for asked in (seer.client.generate([*ids, token], SAMPLED, images=places),
                      seer.client.score([*ids, token], places)):  # fmt: skip
            with pytest.raises(UnreadableError):
                seer.run(asked)


def test_a_tower_trains_and_sampled_placeholders_end_episodes(named, tmp_path):
    for episode, first in check_tower_trains(named, tmp_path / "run", "sync.name=distributed"):
        assert (episode["stop_reason"], episode["turns"]) == ("length", 1)
        assert first["token_ids"][-1] in named.vision.media
        assert not {*first["token_ids"][:-1]}.intersection(named.vision.media)


@pytest.mark.sweep  # one does through vLLM
def test_an_adapter_trains_beside_images(seer, tmp_path):
    check_adapter_trains(seer, tmp_path / "run")


@pytest.mark.sweep
def test_a_server_that_restarts_sees_images(named, tmp_path, sglang_python):
    check_restart(named, server(named.directory, sglang_python), tmp_path)
