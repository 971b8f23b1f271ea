"""Images through the real SGLang."""

import json
import signal
import sys

import pytest
from forked_python import started
from killed_run import die_after
from server_images import (
    CONTEXT,
    SAMPLED,
    Looks,
    Seer,
    check_adapter_trains,
    check_counts,
    check_new_tower,
    check_restart,
    check_samples_and_scores,
    check_tower_trains,
    families,
    png,
    write_model,
)
from vision_models import seeing_model

from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.compose.setup import Given
from rl4llm.compose.trainer import build_trainer
from rl4llm.config import load_config
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import StaleWeightsError, UnreadableError
from rl4llm.extensions.servers.clients.images import UNNAMED
from rl4llm.extensions.servers.launch import launch
from rl4llm.runs.checkpoint import latest_checkpoint
from rl4llm.sync.canary_image import CanaryImage
from rl4llm.sync.verify import Canary

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
    with pytest.raises(StaleWeightsError, match="does not hold version"):
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
    for episode, first in check_tower_trains(named, tmp_path / "run", "sync.name=tensor"):
        assert (episode["stop_reason"], episode["turns"]) == ("length", 1)
        assert first["token_ids"][-1] in named.vision.media
        assert not {*first["token_ids"][:-1]}.intersection(named.vision.media)


@pytest.mark.sweep  # one does through vLLM
def test_an_adapter_trains_beside_images(seer, tmp_path):
    check_adapter_trains(seer, tmp_path / "run")


@pytest.mark.sweep
def test_a_server_that_restarts_sees_images(named, tmp_path, sglang_python):
    check_restart(named, server(named.directory, sglang_python), tmp_path)


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
        {
            "prompt": "<image>?",
            "image": png(FAMILY, seed),
            "second": png(FAMILY, seed + 1),
            "ground_truth": "a",
        }
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


@pytest.mark.sweep  # tests/trainers/test_stream_kills.py does it with text
def test_a_killed_run_trains_the_images_of_its_checkpoint(seer, tmp_path, capsys):
    seer.load(seer.directory)
    with started(__file__, seer.url, seer.directory, tmp_path) as program:
        done = program.end(300)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    stored = [json.loads(line) for line in (checkpoint.path / "played-0.jsonl").read_text().splitlines()]
    assert checkpoint.step == STOPPED and len(stored) == 2  # the draws of two steps
    with ahead(seer.url, seer.directory, tmp_path) as run:
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
