"""Training scripts with the options of michaelnny/rl4llm."""

import json
from pathlib import Path

import pytest
import run_train
from forked_python import python

from rl4llm.config import load_config

ROOT = Path(__file__).parents[4]


@pytest.fixture
def commands(monkeypatch):
    """Return the commands that are run, with their configurations."""
    run = []

    def record(words):
        run.append((words, load_config(words[1], words[2:])))
        return 0

    monkeypatch.setattr(run_train, "rl4llm", record)
    return run


def test_options_of_the_server_become_keys(commands):
    config = str(ROOT / "configs/gsm8k_grpo.yaml")
    given = ["--config-file", config, "--use-infer-server", "--infer-cohost-mode", "seed=3"]
    assert run_train.main("grpo", given=given) == 0
    ((words, config),) = commands
    assert config.inference == {"name": "sglang", "url": "http://localhost:30000", "cohost": True}
    assert words[0] == "train" and config.seed == 3


def test_own_configuration_is_passed_on(commands):
    assert (
        run_train.main(
            "grpo", "env.name=tool", given=["--config-file", str(ROOT / "configs/gsm8k_grpo.yaml")]
        )
        == 0
    )
    ((words, config),) = commands
    assert words == ["train", str(ROOT / "configs/gsm8k_grpo.yaml"), "env.name=tool"]
    assert config.inference["name"] == "local"


@pytest.mark.parametrize("file", ["configs/gsm8k_grpo.yaml", "absent.yaml"])
def test_script_refuses_another_method_and_missing_files(file, commands, capsys):
    assert run_train.main("ppo", given=["--config-file", str(ROOT / file)]) in (1, 2)
    said = capsys.readouterr().err
    assert "algorithm.name=grpo, but this script trains with ppo" in said or "No such file" in said
    assert not commands


def test_each_script_has_the_options():
    scripts = sorted(ROOT.glob("scripts/run_train_*.py"))
    assert len(scripts) == 6
    for script in scripts:
        assert script.name in script.read_text().splitlines()[0]


def test_a_script_trains(model_dir, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"Say {n}."}], "ground_truth": str(n)} for n in "12"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.yaml").write_text(
        f"output: {{dir: {tmp_path / 'run'}}}\ndata: {{path: {tmp_path / 'rows.jsonl'}}}\nmodel: {{path: {model_dir}}}\n"
        "algorithm: {name: grpo}\nrollout: {prompts: 2, group_size: 2, max_tokens: 4}\neval: {every: 0}\nmax_steps: 1\n"
    )
    words = [ROOT / "scripts" / "run_train_grpo.py", "--config-file", tmp_path / "c.yaml"]
    done = python(*words, "seed=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
