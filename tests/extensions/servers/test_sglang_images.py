"""Images through the real SGLang."""

import asyncio
import io
import json
import signal
import sys

import PIL.Image
import pytest
from forked_python import started
from killed_run import die_after
from server_images import (
    CONTEXT,
    SAMPLED,
    Looks,
    Seer,
    check_new_tower,
    check_samples_and_scores,
    check_trains,
    servers_model,  # noqa: F401 - fixture
)
from vision_models import picture

from rl4llm.compose.tables import Given
from rl4llm.compose.trainer import build_trainer
from rl4llm.config import load_config
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import EngineError
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.extensions.servers.launch import launch
from rl4llm.runs.checkpoint import latest_checkpoint

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


STOPPED = 2


class Numbered(BaseRewardFunction):
    """Reward samples by their number, so that every group trains."""

    def __init__(self):
        super().__init__("numbered")

    def __call__(self, messages, ground_truth, **columns):
        raise NotImplementedError

    def score_batch(self, samples):
        return [float(sample.index) for sample in samples]


def ahead(url, directory, output):
    """Return a run whose episodes begin up to two steps before the one that trains them, with images in both turns."""
    rows = [
        {"prompt": "<image>?", "image": png(seed), "second": png(seed + 1), "ground_truth": "a"}
        for seed in range(4)
    ]
    config = load_config(None, [
        f"model.path={directory}", "model.vision=frozen", "model.autocast=none", f"output.dir={output}", "eval.every=0",
        "inference.name=sglang", f"inference.url={url}", f"inference.context_length={CONTEXT}", "rollout.prompts=1",
        "rollout.group_size=4", "rollout.max_tokens=4", "rollout.max_staleness=2", "max_steps=4", "env.max_steps=2",
        "deterministic=true", "tracking.tensorboard=false", "tracking.episodes_every=1", "checkpoint.every=0",
        "training.lr=1e-12",  # so that all versions of the weights give the same log-probs
    ])  # fmt: skip
    return build_trainer(config, Given(dataset=rows, reward_functions=[Numbered()], env_class=Looks))


def test_a_killed_run_trains_the_images_of_its_checkpoint(url, servers_model, tmp_path, capsys):  # noqa: F811
    with started(__file__, url, servers_model, tmp_path) as program:
        done = program.end(300)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    stored = [json.loads(line) for line in (checkpoint.path / "played-0.jsonl").read_text().splitlines()]
    assert checkpoint.step == STOPPED and len(stored) == 2  # the draws of two steps
    with ahead(url, servers_model, tmp_path) as run:
        run.train()
    assert "2 prompts have been played; 0 are played" in capsys.readouterr().out
    for step, unit in enumerate(stored, STOPPED + 1):
        lines = (tmp_path / f"episodes/step-{step:06}.jsonl").read_text().splitlines()
        episodes = [json.loads(line) for line in lines]
        spans = [[span["token_ids"] for span in episode["spans"]] for episode in episodes]
        whole = [[token_ids for _, token_ids, *_ in sample["records"][0]] for sample in unit["samples"]]
        assert all(own == kept[: len(own)] for own, kept in zip(spans, whole, strict=True))
        # The trainer sees what the engine saw.
        assert len(episodes) == 4 and all(episode["mismatch"] < 1e-4 for episode in episodes)


if __name__ == "__main__":
    with ahead(*sys.argv[1:4]) as run:
        die_after(run, STOPPED)
        run.train()
