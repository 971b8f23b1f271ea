"""Command lines of TRL's scripts: read as TRL reads them, with files, mixtures of data sets and adapters."""

import json
import os
import subprocess
from dataclasses import fields

import pytest
from transformers import HfArgumentParser

from rl4llm.core.errors import ConfigError
from rl4llm_compat.trl import (
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ModelConfig,
    RewardConfig,
    RLOOConfig,
    ScriptArguments,
    SFTConfig,
    TrlParser,
    get_dataset,
    get_peft_config,
)
from rl4llm_compat.trl.parser import DatasetMixtureConfig
from rl4llm_compat.trl.script import Script


def test_parsers_read_the_configs():
    line = (
        "--output_dir out --learning_rate 1e-5 --reward_weights 1 0.5 --save_steps 0.5 --bf16 False --beta 0"
    )
    words = line.split()
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(words)
    assert args.given == {"output_dir", "learning_rate", "reward_weights", "save_steps", "bf16"}
    assert (args.learning_rate, args.reward_weights, args.save_steps, args.bf16) == (
        1e-5,
        [1.0, 0.5],
        0.5,
        False,
    )
    made = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config(
        [
            "--generation_batch_size",
            "none",
            "--lora_target_modules",
            "all-linear",
            "--model_init_kwargs",
            '{"a": 1}',
        ]
    )
    assert made[1].generation_batch_size is None
    assert made[1].model_init_kwargs == {"a": 1}
    assert made[2].lora_target_modules == "all-linear"
    assert TrlParser(DPOConfig).parse_args_and_config(["--loss_type", "ipo"])[0].loss_type == ["ipo"]


def test_config_file_gives_defaults_and_variables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAID", "")
    (tmp_path / "c.yaml").write_text("env: {SAID: 3}\nlearning_rate: 0.5\nbeta: 0.25\nother: 1\n")
    parser = TrlParser((GRPOConfig,))
    args, rest = parser.parse_args_and_config(
        ["--config", "c.yaml", "--beta", "0.125"], return_remaining_strings=True
    )
    assert (args.learning_rate, args.beta, rest, os.environ["SAID"]) == (0.5, 0.125, ["--other", "1"], "3")
    with pytest.raises(ConfigError, match=r"unknown keys: --other 1"):
        TrlParser((GRPOConfig,)).parse_args_and_config(["--config", "c.yaml"])
    with pytest.raises(ConfigError, match=r"--config missing\.yaml is not a file"):
        TrlParser((GRPOConfig,)).parse_args_and_config(["--config", "missing.yaml"])


def test_mixture_takes_shares_of_its_data_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 8), ("b", 4)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"x": f"{name}{i}", "y": i}) + "\n" for i in range(count))
        )
    parts = [
        {"path": "json", "data_files": f"{name}.jsonl", "columns": ["x"], "fraction": share}
        for name, share in (("a", 1), ("b", 1))
    ]
    rows = get_dataset(DatasetMixtureConfig(datasets=parts))["train"]
    assert rows["x"] == [f"{name}{i}" for name in "ab" for i in range(4)]


def test_default_dropout_of_an_adapter_is_ignored_aloud():
    with pytest.warns(UserWarning, match=r"lora_dropout=0\.05"):
        chosen = get_peft_config(ModelConfig(use_peft=True))
    keys = Script("sft", {"peft_config": chosen}).keys(None, {})
    assert keys["model.lora.rank"] == 16
    assert keys["model.lora.targets"] == ["q_proj", "v_proj"]
    with pytest.raises(ConfigError, match=r"peft_config\.lora_dropout=0\.25 has no counterpart"):
        Script("sft", {"peft_config": get_peft_config(ModelConfig(use_peft=True, lora_dropout=0.25))}).keys(
            None, {}
        )


LINES = {
    GRPOConfig: "--learning_rate 1e-5 --num_generations 4 --beta 0.1 --reward_weights 1 0.5 --epsilon_high 0.3 "
    "--warmup_steps 0.1 --no_gradient_checkpointing --save_steps 0.5 --use_vllm True --lr_scheduler_type cosine "
    "--eval_strategy steps --eval_steps 0.5 --bf16 False --loss_type grpo --steps_per_generation 8 --epsilon_high none",
    RLOOConfig: "--num-generations 4 --normalize_advantages --max_completion_length 1024",
    DPOConfig: "--loss_type sigmoid --beta 0.5 --no_remove_unused_columns --max_length 512 --learning_rate 5.0e-7",
    KTOConfig: "--learning_rate=5e-7 --lr_scheduler_type=cosine --eval_steps 500 --warmup_steps 0.1 --logging_first_step",
    RewardConfig: "--center_rewards_coefficient 0.01 --eval_strategy steps --eval_steps 50",
    SFTConfig: "--packing --assistant_only_loss True --max_length 128 --dataset_num_proc 12 --seed 7",
}
MODEL = (
    "--output_dir o --use_cpu --model_name_or_path m --use_peft --lora_target_modules q v --dtype bfloat16"
)
PEER = """
import dataclasses, json, sys
import trl
said = {}
for name, words in json.loads(sys.argv[1]).items():
    kinds = (trl.ScriptArguments, getattr(trl, name), trl.ModelConfig)
    made = trl.TrlParser(kinds).parse_args_and_config(words)
    values = {f.name: getattr(o, f.name) for o in made for f in dataclasses.fields(o)}
    said[name] = {key: getattr(value, "value", value) for key, value in values.items()}
print(json.dumps(said, default=repr))
"""


def test_command_lines_are_read_as_trl_reads_them():
    python = os.environ.get("RL4LLM_TRL_PYTHON")
    if not python:
        pytest.skip(
            "RL4LLM_TRL_PYTHON does not name the Python of an environment with TRL, see scripts/bench/README.md"
        )
    lines = {kind: [*line.split(), *MODEL.split()] for kind, line in LINES.items()}
    words = json.dumps({kind.__name__: line for kind, line in lines.items()})
    done = subprocess.run([python, "-c", PEER, words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    for kind, line in lines.items():
        made = TrlParser((ScriptArguments, kind, ModelConfig)).parse_args_and_config(line)
        ours = {item.name: getattr(each, item.name) for each in made for item in fields(each)}
        options = [
            word.partition("=")[0].lstrip("-").replace("-", "_") for word in line if word.startswith("--")
        ]
        told = {name.removeprefix("no_") for name in options}
        assert {name: ours[name] for name in told} == {name: theirs[kind.__name__][name] for name in told}
