"""Images through the real vLLM."""

import pytest
from server_images import (
    CONTEXT,
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

from rl4llm.core.errors import EngineError
from rl4llm.extensions.servers.clients.vllm_images import as_completion
from rl4llm.extensions.servers.launch import launch

pytestmark = pytest.mark.vllm


def server(directory, python):
    flags = [str(directory), "--max-model-len", str(CONTEXT), "--port", "0", "--enable-scale-out"]
    return launch("vllm", [*flags, "--enable-lora"], python=python, cpu=True, ready_within_s=400)


@pytest.fixture(scope="module", params=families("qwen3_vl"))
def seer(request, tmp_path_factory, python_of):
    directory = write_model(tmp_path_factory.mktemp("vllm"), request.param)
    with server(directory, python_of("vllm")) as running, Seer("vllm", running.url, directory) as seer:
        yield seer


def test_images_are_sampled_and_scored_as_by_a_forward(seer):
    check_samples_and_scores(seer)


def test_an_image_seen_before_is_seen_by_the_new_tower(seer, tmp_path):
    check_new_tower(seer, tmp_path)


def test_a_sampled_placeholder_is_a_token(seer):
    seer.load(seer.directory)
    assert seer.score_apart([5], 0, [40, seer.vision.placeholder, 41], 1, [42]) < 1e-5


def test_an_image_of_another_number_of_tokens_is_refused(seer):
    check_counts(seer)


def test_other_tokens_than_those_of_the_prompt_are_refused():
    with pytest.raises(EngineError):
        as_completion({"prompt_token_ids": [1, 9, 2], "choices": []}, [1, 9, 9, 2], "vLLM")


@pytest.mark.sweep  # towers train through SGLang, and an adapter through vLLM below
def test_a_tower_trains_and_sampled_placeholders_are_tokens(seer, tmp_path):
    for episode, _ in check_tower_trains(seer, tmp_path / "run"):
        assert (episode["stop_reason"], episode["turns"]) == ("max_steps", 2)


@pytest.mark.sweep
def test_a_server_that_restarts_sees_images(seer, tmp_path, python_of):
    check_restart(seer, server(seer.directory, python_of("vllm")), tmp_path)


def test_an_adapter_trains_beside_images(seer, tmp_path):
    """The server keeps the adapter, and on a CPU takes no requests for the model itself afterwards."""
    check_adapter_trains(seer, tmp_path / "run")
