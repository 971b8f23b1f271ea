"""Losses that are not finite: skipped and counted, then the run stops and keeps the step for replay."""

import sys
from dataclasses import replace

import pytest
import torch
from ended_runs import metrics
from vowels import prompts

from rl4llm.api import GRPOTrainer
from rl4llm.cli import main
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import DataError, ModelError, NotFiniteError
from rl4llm.core.images import Image
from rl4llm.data.pack import filler
from rl4llm.extensions.inspect.check.replay import load_update
from rl4llm.runs.failed_update import save_update

BAD_ALGORITHM = '''
from dataclasses import dataclass
import torch
from rl4llm.algorithms import GRPO

@dataclass(slots=True)
class Bad(GRPO):
    """The loss of tokens whose id is even is 0 / 0."""

    def token_losses(self, batch, logprobs_BT, entropy_BT):
        loss_BT, metrics = GRPO.token_losses(self, batch, logprobs_BT, entropy_BT)
        return loss_BT.where(batch.token_ids_BT % 2 == 1, loss_BT * torch.nan), metrics
'''


ON_ONE_RANK = BAD_ALGORITHM.replace(
    "batch.token_ids_BT % 2 == 1", "torch.tensor(os.environ.get('RANK') == '0')"
)


class LastLetter(BaseRewardFunction):
    """How late in the alphabet the last letter comes."""

    def __init__(self, name="last_letter", **kwargs):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        return (ord(messages[-1].content[-1:] or "a") % 32) / 32


def run(model_dir, directory, **overrides):
    options = {
        "rollout": {"prompts": 2, "group_size": 4, "max_tokens": 5},
        "training": {"lr": 1e-3, "max_skipped": 2},
        "checkpoint": {"every": 0},
        "max_steps": 5,
    }
    return GRPOTrainer(
        str(model_dir), prompts(4), [LastLetter()], output={"dir": str(directory)}, **options | overrides
    )


def stopped(ranks, place, model_dir, directory, options):
    """Return the error of a run that stops, and what it moved."""
    sys.path.insert(0, str(place))
    trainer = run(model_dir, directory, **options)
    before = {name: tensor.clone() for name, tensor in trainer.trainer.backend.weights()}
    try:
        trainer.train()
    except NotFiniteError as error:
        moved = [
            name
            for name, tensor in trainer.trainer.backend.weights()
            if not torch.equal(tensor, before[name])
        ]
        return str(error), moved
    return "", []


@pytest.fixture
def bad(tmp_path, monkeypatch):
    (tmp_path / "bad_algorithm.py").write_text(BAD_ALGORITHM)
    monkeypatch.syspath_prepend(tmp_path)
    return {"name": "bad_algorithm:Bad"}


def test_two_steps_that_are_not_finite_stop_the_run(model_dir, tmp_path, bad):
    trainer = run(model_dir, tmp_path / "run", algorithm=bad)
    before = {name: tensor.clone() for name, tensor in trainer.trainer.backend.weights()}
    with pytest.raises(NotFiniteError):
        trainer.train()
    for name, tensor in trainer.trainer.backend.weights():
        assert torch.equal(tensor, before[name]), name
    (first,) = metrics(tmp_path / "run")
    assert first["skipped"] == 1


def test_replay_shows_where_a_failed_step_is_not_finite(model_dir, tmp_path, bad, capsys):
    with pytest.raises(NotFiniteError):
        run(model_dir, tmp_path / "run", algorithm=bad).train()
    step = tmp_path / "run" / "failed" / "step-000002"
    update = load_update(step)
    assert update.facts["model"] == "model"
    (number,) = {int((batch.mask_BT & (batch.token_ids_BT % 2 == 0)).sum()) for batch in update.batches}
    assert main(["check", str(step)]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"loss of {number} tokens" in shown
    assert "the model's output of" not in shown


@pytest.mark.parametrize("top_k", [0, 4])
def test_replay_compares_with_the_teacher_again(top_k, model_dir, tmp_path, monkeypatch, capsys):
    code = BAD_ALGORITHM.replace("GRPO", "Distill").replace(
        "loss_BT * torch.nan", "batch.ref_divergence_BT * torch.nan"
    )
    (tmp_path / "bad_distill.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    teacher = {"teacher_path": str(model_dir), "divergence": "forward", "top_k": top_k}
    with pytest.raises(NotFiniteError):
        run(model_dir, tmp_path / "run", algorithm={"name": "bad_distill:Bad", **teacher}).train()
    assert main(["check", str(tmp_path / "run" / "failed" / "step-000002")]) == 0
    shown = capsys.readouterr().out
    assert "loss of" in shown and "output of" not in shown


@pytest.mark.parametrize("backend", [
    pytest.param({"name": "torch", "shard": "ddp"}, marks=pytest.mark.sweep),
    {"name": "torch", "shard": "fsdp2", "cpu_offload": True},
    pytest.param({"name": "deepspeed", "zero_stage": 2}, marks=[pytest.mark.deepspeed, pytest.mark.sweep]),
    pytest.param({"name": "deepspeed", "zero_stage": 3}, marks=pytest.mark.deepspeed),
], ids=lambda backend: "-".join(map(str, backend.values())))  # fmt: skip
def test_all_ranks_skip_a_loss_that_is_not_finite_on_one(
    on_ranks, model_dir, tmp_path, monkeypatch, capsys, backend
):
    (tmp_path / "bad_on_one_rank.py").write_text("import os\n" + ON_ONE_RANK)
    directory, options = tmp_path / "run", {"algorithm": {"name": "bad_on_one_rank:Bad"}, "backend": backend}
    told = on_ranks(stopped, tmp_path, model_dir, directory, options)
    for (text, moved), name in zip(told, ("step-000002", "step-000002-rank1"), strict=True):
        assert "2 optimizer steps in a row" in text and f"{name}` shows" in text
        assert moved == []
        assert load_update(directory / "failed" / name).model.is_dir()
    (first,) = metrics(directory)
    assert first["skipped"] == 1
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", str(directory / "failed" / "step-000002-rank1")]) == 0
    assert "not finite" in capsys.readouterr().out


def test_a_kept_step_knows_its_images(tmp_path):
    class Model:
        def save(self, directory):
            (directory / "weights").touch()

    image = Image("a" * 64, 28, 56)
    seen = replace(filler(0), images=(image,), feature_ids_BT=torch.tensor([[-1, 0]]))
    save_update(tmp_path / "step-000001", [seen, filler(0)], Model(), {"step": 1})
    first, second = load_update(tmp_path / "step-000001").batches
    assert first.images == (image,) and first.feature_ids_BT.tolist() == [[-1, 0]] and second.images == ()


def test_a_directory_without_a_kept_step_is_refused(tmp_path, capsys):
    with pytest.raises(DataError):
        load_update(tmp_path)
    assert main(["check", str(tmp_path)]) == 1


def test_one_bad_step_among_good_ones_does_not_stop_a_run(model_dir, tmp_path, monkeypatch):
    trainer = run(model_dir, tmp_path / "run", **{"training.max_skipped": 2})
    step, calls = trainer.trainer.backend._optimizer.step, []

    def poisoned():
        calls.append(1)
        if len(calls) % 2:
            next(iter(trainer.trainer.backend.model.parameters())).grad.fill_(torch.inf)
        return step()

    monkeypatch.setattr(trainer.trainer.backend._optimizer, "step", poisoned)
    trainer.train()
    rows = metrics(tmp_path / "run")
    assert [row.get("skipped") for row in rows] == [1, None, 1, None, 1]


def test_a_finished_runs_directory_can_be_used_as_a_model(model_dir, tmp_path):
    done = run(model_dir, tmp_path / "one", max_steps=2).train()
    trained = dict(done.trainer.backend.weights())
    following = run(tmp_path / "one", tmp_path / "two", max_steps=1)
    for name, tensor in following.trainer.backend.weights():
        assert torch.equal(tensor, trained[name]), name
    following.train()


def test_an_unfinished_run_cannot_be_used_as_a_model(model_dir, tmp_path):
    with run(model_dir, tmp_path / "one", max_steps=2).trainer as begun:
        begun.resume()
    with pytest.raises(ModelError):
        run(tmp_path / "one", tmp_path / "two")
