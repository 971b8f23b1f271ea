"""Runs of two ranks that are killed: at any time, at each moment of saving and publishing, and what was saved damaged."""

import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rank_processes import RankProcesses
from vowels import Vowels

from rl4llm.api import GRPOTrainer
from rl4llm.core.checkpoint import latest_checkpoint

KILLS = int(os.environ.get("RL4LLM_KILLS", "0"))  # 30 of each backend, for the figure that the README gives
DDP, FSDP2 = {"name": "torch", "shard": "ddp"}, {"name": "torch", "shard": "fsdp2"}
ZERO2, ZERO3 = ({"name": "deepspeed", "zero_stage": stage} for stage in (2, 3))
EVERY = 2  # steps from one checkpoint to the next
ROWS = [
    {"prompt_id": str(i), "messages": [{"role": "user", "content": f"Say {i}."}], "ground_truth": str(i)} for i in range(6)
]


def trainer(model_dir, directory, backend, **options):
    return GRPOTrainer(
        str(model_dir), ROWS, [Vowels()], output={"dir": str(directory)}, backend=backend, deterministic=True,
        tracking={"tensorboard": False},
        **{"rollout.prompts": 2, "rollout.group_size": 4, "rollout.max_tokens": 5, "training.lr": 3e-3, "max_steps": 6,
           "checkpoint.every": EVERY, "eval.every": 0, "timeout_s": 60} | options,
    )  # fmt: skip


def trained(ranks, model_dir, directory, backend, options=()):
    """The weights after a run, on the first rank."""
    run = trainer(model_dir, directory, backend, **dict(options)).train().trainer
    weights = {name: tensor.clone() for name, tensor in run.backend.weights()}
    return weights if ranks.is_first else None


def assert_same_weights(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def steps_logged(directory):
    log = Path(directory) / "metrics.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def step_saved(directory):
    checkpoint = latest_checkpoint(Path(directory) / "checkpoints")
    return checkpoint.step if checkpoint else 0


@pytest.fixture
def processes():
    """Two ranks that may be killed; the next call starts new ones."""
    with RankProcesses(size=2, DS_ACCELERATOR="cpu") as processes:
        yield processes


@dataclass
class Whole:
    """A run that nobody killed: its last weights, and how long it took."""

    weights: dict
    seconds: float


@pytest.fixture(scope="module")
def whole(model_dir, tmp_path_factory):
    """The run of a backend that nobody killed, made once."""
    found = {}

    def run(backend, **options):
        key = str((backend, options))
        if key not in found:
            with RankProcesses(size=2, DS_ACCELERATOR="cpu") as processes:
                processes(joined)
                start = time.monotonic()
                directory = tmp_path_factory.mktemp("whole")
                weights, _ = processes(trained, model_dir, directory, backend, tuple(options.items()))
                found[key] = Whole(weights, time.monotonic() - start)
        return found[key]

    return run


def joined(ranks):
    return ranks.rank


def random_backends():
    deepspeed = pytest.mark.deepspeed
    kills = {"ddp": (DDP, 4, ()), "zero-2": (ZERO2, 4, deepspeed), "fsdp2": (FSDP2, 0, ()), "zero-3": (ZERO3, 0, deepspeed)}
    return [
        pytest.param(backend, KILLS or usual, marks=marks, id=name)
        for name, (backend, usual, marks) in kills.items()
        if KILLS or usual
    ]


@pytest.mark.parametrize(("backend", "kills"), random_backends())
def test_killed_at_random_times_no_run_loses_more_than_one_interval_or_ends_with_other_weights(
    whole, processes, model_dir, tmp_path, backend, kills
):
    expected, chance, done, saved = whole(backend), random.Random(0), 0, 0
    for _ in range(kills):
        directory = tmp_path / str(done)
        processes.begin(trained, model_dir, directory, backend)
        if processes.over_within(chance.uniform(0.0, expected.seconds)):
            assert_same_weights(processes.end()[0], expected.weights)
            done, saved = done + 1, 0
            continue
        processes.kill(*chance.choice([(0,), (1,), (0, 1)]))
        processes.over_within(chance.uniform(0.0, 0.5))  # how long the other one lives on
        processes.close()
        now = step_saved(directory)
        assert now >= saved
        assert max(steps_logged(directory), default=0) - now <= EVERY
        saved = now
    assert_same_weights(processes(trained, model_dir, tmp_path / str(done), backend)[0], expected.weights)
    assert steps_logged(tmp_path / str(done)) == [1, 2, 3, 4, 5, 6]
