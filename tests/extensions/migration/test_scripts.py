"""Training scripts with the options of michaelnny/rl4llm."""

import json
from pathlib import Path

import pytest
import run_train
from forked_python import python

from rl4llm.config import load_config

ROOT = Path(__file__).parents[3]
SOURCES = Path(__file__).parent / "sources"


@pytest.fixture
def commands(monkeypatch):
    """Return the commands that are run, with their configurations."""
    run = []

    def record(words):
        run.append((words, load_config(words[1], words[2:])))
        return 0

    monkeypatch.setattr(run_train, "rl4llm", record)
    return run


def test_configuration_of_the_original_is_converted(commands):
    given = [
        "--config-file",
        str(SOURCES / "original.yaml"),
        "--use-infer-server",
        "--infer-cohost-mode",
        "seed=3",
    ]
    assert run_train.main("dapo", given=given) == 0
    ((words, config),) = commands
    assert config.inference == {"name": "sglang", "url": "http://localhost:30000", "cohost": True}
    assert (config.algorithm["name"], config.rollout.group_size, config.seed) == ("dapo", 16, 3)
    assert words[0] == "train"


METHODS = {
    "grpo": "grpo", "dapo": "dapo", "ppo": "ppo", "explore_grpo": "explore_grpo", "grpo_tools": "grpo",
    "value_net": "ppo",
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_file_of_each_script_is_converted(name, commands):
    file = SOURCES / "original" / f"{name}.yaml"
    assert run_train.main(METHODS[name], given=["--config-file", str(file)]) == 0
    ((words, config),) = commands
    assert words[1] != str(file)
    assert config.algorithm["name"] == METHODS[name]


def test_file_without_a_known_method_is_the_originals(commands, tmp_path):
    (tmp_path / "c.yaml").write_text("model: {pretrained_model: m}\ndataset: {names: [gsm]}\n")
    assert run_train.main("dapo", given=["--config-file", str(tmp_path / "c.yaml")]) == 0
    assert commands[0][1].data.path == "openai/gsm8k:main"


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
    assert run_train.main("ppo", given=["--config-file", str(ROOT / file)]) == 2
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
        f"logging: {{output_dir: {tmp_path / 'run'}}}\ndataset: {{names: ['{tmp_path / 'rows.jsonl'}']}}\n"
        f"model: {{pretrained_model: {model_dir}}}\n"
        "grpo: {max_steps: 1, train_rollout_size: 4, group_size: 2, max_completion_tokens: 4, eval_interval: 0}\n"
    )
    words = [ROOT / "scripts" / "run_train_grpo.py", "--config-file", tmp_path / "c.yaml"]
    done = python(*words, "data.system_prompt=null", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
