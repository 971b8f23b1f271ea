"""Images through the real vLLM."""

import asyncio
import io

import PIL.Image
import pytest
from server_images import (
    CONTEXT,
    Seer,
    check_new_tower,
    check_samples_and_scores,
    check_trains,
    servers_model,  # noqa: F401 - fixture
)
from vision_models import picture

from rl4llm.core.errors import EngineError
from rl4llm.extensions.servers.clients.vllm import VLLMClient
from rl4llm.extensions.servers.clients.vllm_images import as_completion
from rl4llm.extensions.servers.launch import launch

pytestmark = pytest.mark.vllm


def png(seed):
    file = io.BytesIO()
    PIL.Image.fromarray(picture("qwen2_5_vl", 1, 2, seed)).save(file, format="PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def url(servers_model, python_of):  # noqa: F811
    flags = [str(servers_model), "--max-model-len", str(CONTEXT), "--port", "0", "--enable-scale-out"]
    with launch("vllm", flags, python=python_of("vllm"), cpu=True, ready_within_s=400) as server:
        yield server.url


@pytest.fixture
def seer(url, servers_model):  # noqa: F811
    seer = Seer(VLLMClient, url, servers_model)
    yield seer
    asyncio.run(seer.client.close())


def test_images_are_sampled_and_scored_as_by_a_forward(seer):
    check_samples_and_scores(seer)


def test_an_image_seen_before_is_seen_by_the_new_tower(seer, tmp_path):
    try:
        check_new_tower(seer, tmp_path)
    finally:
        seer.load(seer.directory, 8)


def test_a_sampled_placeholder_is_a_token(seer):
    assert seer.score_apart([5], 0, [40, seer.vision.placeholder, 41], 1, [42]) < 1e-5


def test_other_tokens_than_those_of_the_prompt_are_refused():
    with pytest.raises(EngineError, match="other tokens"):
        as_completion({"prompt_token_ids": [1, 9, 2], "choices": []}, [1, 9, 9, 2], "vLLM")


def test_a_step_trains_through_the_server(url, servers_model, tmp_path):  # noqa: F811
    check_trains("vllm", url, servers_model, tmp_path / "run", png)
