"""Trainers of Python: where a script's runs are, and what is measured without training."""

import sys
from types import ModuleType

import pytest
from small_run import CONFIG

from rl4llm import GRPOTrainer
from rl4llm.core.errors import ConfigError
from rl4llm.tracking.tracker import read_jsonl

ROWS = [{"prompt": f"{number}+1?", "ground_truth": str(number + 1)} for number in range(8)]


def trainer(model_dir, **keys):
    sizes = {key: CONFIG[key] for key in ("rollout", "training", "checkpoint", "deterministic", "max_steps")}
    keys = sizes | {"model.autocast": "none"} | keys
    return GRPOTrainer(str(model_dir), ROWS, CONFIG["rewards"], **keys)


@pytest.mark.parametrize(
    ("file", "name"), [("here/first.py", "first"), ("here/tool/__main__.py", "tool"), (None, "rl4llm")]
)
def test_a_script_has_a_directory_for_its_runs(file, name, model_dir, tmp_path, monkeypatch):
    script = ModuleType("__main__")
    if file:
        script.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.chdir(tmp_path)
    with trainer(model_dir, output={"console": "quiet"}).trainer as made:
        assert str(made.run.path) == f"runs/{name}"
    with trainer(model_dir, output={"dir": "elsewhere"}).trainer as made:
        assert str(made.run.path) == "elsewhere"


def test_a_trainer_measures_before_and_after_it_trains(model_dir, tmp_path, capsys):
    run = tmp_path / "run"
    keys = {"output.dir": str(run), "eval_dataset": ROWS[:4], "eval.every": 2, "eval.split": "test"}
    with pytest.raises(ConfigError):
        trainer(model_dir, **{"output.dir": str(tmp_path / "other")}).evaluate()
    ours = trainer(model_dir, **keys)
    before = ours.evaluate()
    assert not run.exists()
    ours.train()
    assert str(run / "model") in capsys.readouterr().out.splitlines()[-1]
    stored = read_jsonl(run / "eval.jsonl")
    for measured, row in zip((before, ours.evaluate()), (stored[0], stored[-1]), strict=True):
        assert measured["reward/mean"] == pytest.approx(row["reward/mean"], abs=1e-6)
    assert read_jsonl(run / "eval.jsonl") == stored
