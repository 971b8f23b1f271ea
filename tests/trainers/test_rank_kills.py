"""Runs of two ranks that are killed: at any time, at each moment of saving and publishing, and what was saved damaged."""

import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from aiohttp import web
from ended_runs import assert_same_weights
from fault_server import FaultServer, serving
from rank_processes import RankProcesses
from sweeps import sampled
from vowels import Vowels, prompts

from rl4llm.api import GRPOTrainer
from rl4llm.backends.models import load_model
from rl4llm.backends.tiny import build_model
from rl4llm.core.errors import CheckpointError, RunDirError
from rl4llm.runs.checkpoint import latest_checkpoint
from rl4llm.runtime.ranks import Ranks

# at random times, of each backend; 30 for the figure in the docs
KILLS = int(os.environ.get("RL4LLM_KILLS", "0"))
DDP, FSDP2 = {"name": "torch", "shard": "ddp"}, {"name": "torch", "shard": "fsdp2"}
ZERO2, ZERO3 = ({"name": "deepspeed", "zero_stage": stage} for stage in (2, 3))
STEPS, EVERY = 5, 2  # EVERY: steps from one checkpoint to the next


def trainer(model_dir, directory, backend, **options):
    return GRPOTrainer(
        str(model_dir), prompts(), [Vowels()], output={"dir": str(directory)}, backend=backend, deterministic=True,
        tracking={"tensorboard": False},
        **{"rollout.prompts": 2, "rollout.group_size": 4, "rollout.max_tokens": 5, "training.lr": 3e-3, "max_steps": STEPS,
           "checkpoint.every": EVERY, "eval.every": 0, "timeout_s": 60} | options,
    )  # fmt: skip


def trained(ranks, model_dir, directory, backend, options=()):
    """Return the weights after a run, on the first rank."""
    run = trainer(model_dir, directory, backend, **dict(options)).train().trainer
    weights = {name: tensor.clone() for name, tensor in run.backend.weights()}
    return weights if ranks.is_first else None


def steps_logged(directory):
    log = Path(directory) / "metrics.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def step_saved(directory):
    checkpoint = latest_checkpoint(Path(directory) / "checkpoints")
    return checkpoint.step if checkpoint else 0


@pytest.fixture
def processes():
    """Return two ranks that may be killed; the next call starts new ones."""
    with RankProcesses(size=2, DS_ACCELERATOR="cpu") as processes:
        yield processes


@dataclass
class Whole:
    """A run that nobody killed: its last weights, and how long it took."""

    weights: dict
    seconds: float


@pytest.fixture(scope="module")
def whole(on_ranks, model_dir, tmp_path_factory):
    """Return the uninterrupted run of a backend, made once."""
    found = {}

    def run(backend):
        if str(backend) not in found:
            start = time.monotonic()
            weights, _ = on_ranks(trained, model_dir, tmp_path_factory.mktemp("whole"), backend)
            found[str(backend)] = Whole(weights, time.monotonic() - start)
        return found[str(backend)]

    return run


BACKENDS = [
    pytest.param(DDP, id="ddp"),
    pytest.param(ZERO2, id="zero-2", marks=pytest.mark.deepspeed),
    pytest.param(FSDP2, id="fsdp2", marks=pytest.mark.sweep),
    pytest.param(ZERO3, id="zero-3", marks=[pytest.mark.sweep, pytest.mark.deepspeed]),
]


@pytest.mark.sweep  # the tests below kill runs at chosen moments
@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_killed_at_random_times_lose_at_most_one_interval(
    whole, processes, model_dir, tmp_path, backend, sweep
):
    kills = KILLS or (4 if sweep else 1)
    expected, chance, killed, resumed, done, saved = whole(backend), random.Random(0), 0, 0, 0, 0
    while killed < kills or resumed < max(1, kills // 2):  # some die before they have saved anything
        directory = tmp_path / str(done)
        processes.begin(trained, model_dir, directory, backend)
        after = saved or EVERY * (kills == 1)  # a single kill comes after the first checkpoint
        if over_before(chance, processes, directory, after, expected.seconds):
            assert_same_weights(processes.end()[0], expected.weights)
            done, saved = done + 1, 0
            continue
        killed += 1
        processes.kill(*chance.choice([(0,), (1,), (0, 1)]))
        processes.over_within(chance.uniform(0.0, 0.5))  # how long the other one lives on
        processes.close()
        now = step_saved(directory)
        assert now >= saved
        assert max(steps_logged(directory), default=0) - now <= EVERY
        resumed, saved = resumed + (now > 0), now
    assert_same_weights(processes(trained, model_dir, tmp_path / str(done), backend)[0], expected.weights)
    assert steps_logged(tmp_path / str(done)) == list(range(1, STEPS + 1))


def over_before(chance, processes, directory, after, seconds):
    """Return whether a run is over before a random moment: the start, or up to a step's time after a random step of it.

    By its steps, as what a run takes in seconds changes with what else the machine does.
    """
    first = chance.randint(after, STEPS - 1)
    while first > 0 and max(steps_logged(directory), default=0) < first:
        if processes.over_within(0.01):
            return True
    return processes.over_within(chance.uniform(0.0, seconds / STEPS))


@dataclass(frozen=True)
class Moment:
    """When the first rank is about to do what `change` matches for the `nth` time, the `victim` is killed; or, with
    `bytes_more`, the first rank itself in the middle of the write that makes a file larger than that."""

    change: str
    nth: int = 1
    victim: int = 0
    bytes_more: int = 0


def trained_until(ranks, moment, *given):
    """Train, until the kill; what says whether it was reached is who is dead."""
    pids = ranks.gather(os.getpid())
    if ranks.is_first:
        # a file that grows beyond its limit is the end, at once
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.addaudithook(Strike(moment, pids))
    return trained(ranks, *given)


class Strike:
    """An audit hook of the interpreter, which is called before every file is opened, renamed or removed."""

    def __init__(self, moment, pids):
        self.pattern, self.left, self.moment, self.pids = re.compile(moment.change), moment.nth, moment, pids

    def __call__(self, event, args):
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "shutil.rmtree"):
            return
        if not self.pattern.fullmatch(f"{event} " + " ".join(str(item) for item in args[:2])):
            return
        self.left -= 1
        if self.left == 0 and self.moment.bytes_more:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.moment.bytes_more,) * 2)
        elif self.left == 0:
            os.kill(self.pids[self.moment.victim], signal.SIGKILL)


SCRATCH, FINAL = r".*/step-\d+\.tmp-\w+", r".*/step-\d+"
SAVING = {
    "before its directory": Moment(rf"os.mkdir {SCRATCH} \d+"),
    "before the model's directory": Moment(rf"os.mkdir {SCRATCH}/model \d+"),
    "before the weights": Moment(rf"open {SCRATCH}/model/weights.safetensors w"),
    "in the middle of a tensor": Moment(rf"open {SCRATCH}/model/weights.safetensors w", bytes_more=20_000),
    "between weights and moments": Moment(rf"open {SCRATCH}/model/optimizer.safetensors w"),
    "before the optimizer's state": Moment(rf"open {SCRATCH}/model/backend.json w"),
    "before the ranks' random states": Moment(rf"open {SCRATCH}/state.json w"),
    "before the manifest": Moment(rf"open {SCRATCH}/manifest.json w"),
    "before fsync": Moment(rf"open {SCRATCH}/manifest.json r"),
    "before the name": Moment(rf"os.rename {SCRATCH} {FINAL}"),
    "before the pointer": Moment(r"os.rename .*/latest.tmp-\w+ .*/latest"),
    "before pruning": Moment(rf"os.rename {FINAL} {SCRATCH}"),
    "in the middle of pruning": Moment(rf"shutil.rmtree {SCRATCH} .*"),
    "the other rank, before the directory": Moment(rf"os.mkdir {SCRATCH} \d+", victim=1),
    "the other rank, with the weights": Moment(rf"open {SCRATCH}/model/weights.safetensors w", victim=1),
    "the other rank, with the moments": Moment(rf"open {SCRATCH}/model/optimizer.safetensors w", victim=1),
    "the other rank, before the manifest": Moment(rf"open {SCRATCH}/manifest.json w", victim=1),
}
SAMPLE = {  # tests/runs has the other moments, of one rank
    "ddp": ("in the middle of a tensor", "the other rank, before the manifest"),
    "deepspeed": ("the other rank, with the moments",),
}  # fmt: skip
SAVED = ("before the pointer", "before pruning", "in the middle of pruning")


def dies(processes, moment, *given, options=()):
    """Train until a moment, at which a rank must die; the other one is then killed too."""
    processes.begin(*((trained_until, moment) if moment else (trained,)), *given, options)
    assert processes.dead(moment.victim if moment else 0), f"{moment} was not reached"
    processes.over_within(1.0)
    processes.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_killed_while_saving_resumes(whole, processes, model_dir, tmp_path, backend, sweep):
    options = {"checkpoint.every": 1, "checkpoint.keep": 1}
    expected = whole(backend)
    given = model_dir, tmp_path, backend
    processes(trained, *given, tuple((options | {"max_steps": 1}).items()))
    for name in SAVING if sweep else SAMPLE[backend.get("shard", "deepspeed")]:
        moment = SAVING[name]
        before = step_saved(tmp_path)
        dies(processes, moment, *given, options=tuple(options.items()))
        now = step_saved(tmp_path)
        assert now == before + (name in SAVED) or (moment.victim == 1 and now in (before, before + 1)), name
    assert_same_weights(processes(trained, *given, tuple(options.items()))[0], expected.weights)


SECOND = r".*/weights/v000002\.tmp-\w+"
PUBLISHING = {  # of version 2, after version 1, from which the run resumed
    "before its directory": Moment(rf"os.mkdir {SECOND} \d+"),
    "in the middle of a tensor": Moment(rf"open {SECOND}/model-.*.safetensors [wx]", bytes_more=20_000),
    "the other rank, with the weights": Moment(rf"open {SECOND}/model-.*.safetensors [wx]", victim=1),
    "before its manifest": Moment(rf"open {SECOND}/manifest.json w"),
    "before its name": Moment(rf"os.rename {SECOND} .*/v000002"),
    "before the pointer": Moment(r"os.rename .*/LATEST.tmp-\w+ .*/LATEST", nth=2),
    "before the server is asked": None,
    "when the server has it, before the proof": None,
}
TOGETHER = (  # what two ranks add; tests/sync has every moment of one
    "the other rank, with the weights", "when the server has it, before the proof",
)  # fmt: skip


def slay(processes, *, after):
    """Kill the first rank at its request, before or after the server handles it."""

    async def fault(server, request, answer):
        found = await answer() if after else None
        processes.kill(0)
        return web.json_response(found or await answer())

    return fault


def test_a_run_killed_while_publishing_resumes(processes, tokenizer, model_dir, tmp_path, sweep):
    model, options = load_model(model_dir), {"checkpoint.every": 1, "max_steps": 3}

    def given(server, name, **more):
        through = {"inference": {"name": "sglang", "url": server.url, "deadline_s": 30.0}}
        weights = {"sync": {"dir": str(tmp_path / name / "weights")}}
        return model_dir, tmp_path / name, FSDP2, tuple((options | through | weights | more).items())

    with serving(FaultServer(model, tokenizer, one_by_one=True)) as server:
        expected, _ = processes(trained, *given(server, "whole"))
    with serving(FaultServer(model, tokenizer, one_by_one=True)) as server:
        processes(trained, *given(server, "killed", max_steps=1))
        for name in PUBLISHING if sweep else TOGETHER:
            moment = PUBLISHING[name]
            if moment is None:
                server.next("/update_weights_from_disk", None, slay(processes, after="has it" in name))
            *where, through = given(server, "killed")
            dies(processes, moment, *where, options=through)
            assert step_saved(tmp_path / "killed") == 1
        found, _ = processes(trained, *given(server, "killed"))
    assert_same_weights(found, expected)
    assert sorted(path.name for path in (tmp_path / "killed" / "weights").glob("[!.]*")) == [
        "LATEST",
        "v000002",
        "v000003",
    ]


def told(ranks, *given):
    """Return what a run printed, and its last weights."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        weights = trained(ranks, *given)
    return " ".join(out.getvalue().split()), weights


@pytest.fixture(scope="module")
def two_runs(on_ranks, model_dir, tmp_path_factory):
    """Return two equal runs with checkpoints of steps 1 and 2, and the weights of step 3."""
    root = tmp_path_factory.mktemp("runs")
    options = {"checkpoint.every": 1, "max_steps": 2}
    for name in ("one", "other"):
        on_ranks(trained, model_dir, root / name, DDP, tuple(options.items()))
    shutil.copytree(root / "one", root / "on")
    weights, _ = on_ranks(trained, model_dir, root / "on", DDP, tuple((options | {"max_steps": 3}).items()))
    return root, weights


def harm(newest, other, how):
    """Damage the newest checkpoint of two, or what names it."""
    weights = newest / "model" / "weights.safetensors"
    if how == "truncated":
        os.truncate(weights, weights.stat().st_size - 1)
    elif how == "missing":
        (newest / "model" / "optimizer.safetensors").unlink()
    elif how == "empty pointer":
        os.truncate(newest.parent / "latest", 0)
    elif how == "wrong hash":
        content = bytearray(weights.read_bytes())
        content[-9] ^= 4
        weights.write_bytes(content)
    elif how == "foreign run":
        shutil.rmtree(newest)
        shutil.copytree(other, newest)
    else:
        newest.rename(newest.with_name(f"{newest.name}.tmp-00c0ffee"))


@pytest.mark.parametrize(("how", "step", "line"), sampled([
    ("truncated", 1, "Warning: step-000002: model/weights.safetensors has [0-9,]+ bytes instead of"),
    ("missing", 1, "Warning: step-000002: model/optimizer.safetensors is missing"),
    ("empty pointer", 2, ""),
    ("wrong hash", 1, "Warning: step-000002: model/weights.safetensors is damaged"),
    ("foreign run", 1, "Warning: step-000002: it belongs to the run "),
    ("half renamed", 1, "Warning: step-000002.tmp-00c0ffee: a save that was interrupted"),
], lambda case: case[0] in ("truncated", "empty pointer")))  # fmt: skip
def test_two_ranks_resume_from_the_last_good_checkpoint_and_warn(
    two_runs, on_ranks, model_dir, tmp_path, how, step, line
):
    root, expected = two_runs
    shutil.copytree(root / "one", tmp_path / "run")
    harm(
        tmp_path / "run" / "checkpoints" / "step-000002", root / "other" / "checkpoints" / "step-000002", how
    )
    options = {"checkpoint.every": 1, "max_steps": 3}
    (text, weights), _ = on_ranks(told, model_dir, tmp_path / "run", DDP, tuple(options.items()))
    assert f"after step {step}" in text
    assert re.search(line, text), text
    assert_same_weights(weights, expected)


def test_other_ranks_and_backends_resume_but_no_other_model(two_runs, model_dir, tokenizer, tmp_path):
    root, expected = two_runs
    shutil.copytree(root / "one", tmp_path / "run")
    alone = {"rollout.prompts": 4, "checkpoint.every": 1, "max_steps": 3}
    text, weights = told(Ranks(), model_dir, tmp_path / "run", {"name": "torch"}, tuple(alone.items()))
    for line in (
        "after step 2",
        "random states of 2 ranks, but this run has 1",
        "processes: 2 -> 1",
        "backend.shard: 'ddp' -> nothing",
    ):
        assert line in text, text
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=2e-4, rtol=0)

    shutil.copytree(model_dir, tmp_path / "model")
    shutil.copytree(root / "one", tmp_path / "moved")
    with pytest.raises(RunDirError):
        told(Ranks(), tmp_path / "model", tmp_path / "moved", {"name": "torch"}, tuple(alone.items()))
    build_model(tokenizer, seed=0, hidden_size=32, num_layers=2).save_pretrained(tmp_path / "model")
    identity = tmp_path / "moved" / "run.json"
    identity.write_text(identity.read_text().replace(str(model_dir), str(tmp_path / "model")))
    with pytest.raises(CheckpointError):
        told(Ranks(), tmp_path / "model", tmp_path / "moved", {"name": "torch"}, tuple(alone.items()))
    assert (
        json.loads((tmp_path / "moved" / "checkpoints" / "step-000002" / "state.json").read_text())["step"]
        == 2
    )
