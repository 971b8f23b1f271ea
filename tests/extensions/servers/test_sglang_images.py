"""Images through the real SGLang."""

import asyncio
import io

import PIL.Image
import pytest
from server_images import (
    CONTEXT,
    SAMPLED,
    Seer,
    check_new_tower,
    check_samples_and_scores,
    check_trains,
    servers_model,  # noqa: F401 - fixture
)
from vision_models import picture

from rl4llm.core.errors import EngineError
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.extensions.servers.launch import launch

pytestmark = pytest.mark.sglang


def png(seed):
    file = io.BytesIO()
    PIL.Image.fromarray(picture("qwen2_5_vl", 1, 2, seed)).save(file, format="PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def url(servers_model, sglang_python):  # noqa: F811
    flags = ["--model-path", str(servers_model), "--context-length", str(CONTEXT), "--port", "0"]
    with launch(
        "sglang", [*flags, "--enable-multimodal"], python=sglang_python, cpu=True, ready_within_s=400
    ) as server:
        yield server.url


@pytest.fixture
def seer(url, servers_model):  # noqa: F811
    seer = Seer(SGLangClient, url, servers_model)
    yield seer
    asyncio.run(seer.client.close())


def test_images_are_sampled_and_scored_as_by_a_forward(seer):
    check_samples_and_scores(seer)


def test_an_image_seen_before_is_seen_by_the_new_tower(seer, tmp_path):
    try:
        check_new_tower(seer, tmp_path)
    finally:
        seer.load(seer.directory, 8)


def test_a_prompt_that_the_server_reads_otherwise_is_refused(seer):
    ids, places = seer.prompt(0, [40])
    with pytest.raises(EngineError, match="in a prompt of 9"):
        seer.run(seer.client.generate([1, *ids[1:]], SAMPLED, images=places))


def test_a_sampled_placeholder_ends_the_reply(seer):
    ids, places = seer.prompt([5], 0, [40])
    params = [SAMPLED.replace(max_tokens=300, seed=seed) for seed in range(12)]
    replies = seer.run(*(seer.client.generate(ids, one, images=places) for one in params))
    mark = seer.vision.placeholder
    ended = [reply.token_ids for reply in replies if mark in reply.token_ids]
    assert ended and all(token_ids.index(mark) == len(token_ids) - 1 for token_ids in ended)
    assert {reply.finish_reason for reply in replies} == {"length"}
    later = seer.client.generate([*ids, *ended[0], 40], SAMPLED, images=places)
    (reply,) = seer.run(later)
    assert reply.finish_reason == "abort" and not reply.token_ids


def test_a_step_trains_through_the_server(url, servers_model, tmp_path):  # noqa: F811
    check_trains("sglang", url, servers_model, tmp_path / "run", png)
