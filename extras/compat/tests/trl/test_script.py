"""Names of TRL: each is known, becomes what it says, and nothing is taken in silence."""

import json
import os
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from rl4llm.compose import build_algorithm
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError, DataError, ModelError
from rl4llm_compat.trl import (
    DPOConfig,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
    rewards,
    rows,
)
from rl4llm_compat.trl.joint import JOINTS
from rl4llm_compat.trl.script import Script
from rl4llm_compat.trl.table import TABLES

ROOT = Path(__file__).parents[4]
CONFIGS = {
    cls.algorithm: cls for cls in (GRPOConfig, RLOOConfig, DPOConfig, SFTConfig, KTOConfig, RewardConfig)
}
PROMPTS = [{"prompt": "a"}] * 64


def keys_of(config=None, own=None, dataset=PROMPTS, **arguments):
    algorithm = config.algorithm if config else "grpo"
    given = arguments if config is None else {"args": config, **arguments}
    return Script(algorithm, given).keys(dataset, own or {})


@pytest.mark.parametrize("algorithm", TABLES)
def test_every_argument_of_transformers_is_known(algorithm):
    assert {item.name for item in fields(TrainingArguments)} <= TABLES[algorithm].keys()


@pytest.fixture(scope="module")
def of_trl():
    """The fields of TRL's configs and their defaults, from an environment with TRL."""
    python = os.environ.get("RL4LLM_TRL_PYTHON")
    if not python:
        pytest.skip(
            "RL4LLM_TRL_PYTHON does not name the Python of an environment with TRL, see scripts/bench/README.md"
        )
    code = f"""
import dataclasses, json, trl
fields = {{name: dataclasses.fields(getattr(trl, name)) for name in {[cls.__name__ for cls in CONFIGS.values()]}}}
print(json.dumps({{name: {{item.name: repr(getattr(item.default, "value", item.default)) for item in items}}
                   for name, items in fields.items()}}))
"""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_names_and_defaults_are_those_of_trl(algorithm, of_trl):
    theirs, ours = of_trl[CONFIGS[algorithm].__name__], TABLES[algorithm]
    assert theirs.keys() <= ours.keys()
    made = {"output_dir", "bf16"}  # after the dataclass
    speaking = {
        name for name in theirs if ours[name].kind != "inert" and "MISSING" not in theirs[name]
    } - made
    assert not {name: theirs[name] for name in speaking if theirs[name] != repr(ours[name].default)}


@pytest.mark.parametrize("algorithm", TABLES)
def test_every_name_that_is_read_together_with_others_is_read(algorithm):
    read = {name for joint in JOINTS[algorithm] for name in joint.names}
    together = {name for name, alias in TABLES[algorithm].items() if alias.kind == "joint"}
    elsewhere = {"reward_weights", "fp16", "assistant_only_loss", "completion_only_loss"}
    assert together - elsewhere <= read


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_a_config_with_nothing_but_defaults_is_a_configuration(algorithm):
    keys = keys_of(CONFIGS[algorithm]("out"))
    config = load_config(
        overrides={"algorithm": {"name": algorithm}, **keys, "model.path": "m", "data.path": "d"}
    )
    build_algorithm(config)
    assert config.output.dir == "out"
    assert config.training.betas == [0.9, 0.999]
    assert config.training.schedule == "linear"
    assert config.model.autocast == "bfloat16"


@pytest.mark.parametrize(
    ("said", "prompts", "updates", "steps"),
    [
        ({}, 1, 1, 192),  # 64 rows, three times, one prompt of eight completions at a time
        ({"per_device_train_batch_size": 32}, 4, 1, 48),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}, 4, 1, 48),
        ({"per_device_train_batch_size": 16, "steps_per_generation": 4}, 8, 4, 24),
        ({"per_device_train_batch_size": 16, "generation_batch_size": 64, "max_steps": 10}, 8, 4, 3),
        (
            {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
            8,
            1,
            24,
        ),
        ({"per_device_train_batch_size": 16, "num_iterations": 2, "max_steps": 10}, 2, 1, 5),
        (
            {"per_device_train_batch_size": 24, "num_train_epochs": 1},
            3,
            1,
            21,
        ),  # one row is left out, as by TRL
    ],
)
def test_batches_and_steps_are_counted_as_trl_does(said, prompts, updates, steps):
    keys = keys_of(GRPOConfig("out", **said))
    found = [keys[key] for key in ("rollout.prompts", "training.updates_per_rollout", "max_steps")]
    assert found == [prompts, updates, steps]


def test_a_rollout_is_shared_by_the_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    keys = keys_of(GRPOConfig("out", per_device_train_batch_size=16, generation_batch_size=128))
    assert (keys["rollout.prompts"], keys["training.updates_per_rollout"], keys["max_steps"]) == (4, 2, 12)


def test_save_eval_and_warmup_steps_count_optimizer_steps():
    said = {"per_device_train_batch_size": 16, "steps_per_generation": 4, "max_steps": 400}
    config = GRPOConfig(
        "out", **said, save_steps=0.25, eval_strategy="steps", eval_steps=20, warmup_steps=0.1
    )
    keys = keys_of(config)
    assert (
        keys["max_steps"],
        keys["checkpoint.every"],
        keys["eval.every"],
        keys["training.warmup_steps"],
    ) == (100, 25, 5, 40)


def test_a_keyword_alone_changes_only_what_it_names():
    assert keys_of(num_generations=4) == {"rollout.group_size": 4}
    assert keys_of(epsilon=0.1) == {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1}
    assert keys_of(loss_type="grpo") == {"algorithm.name": "grpo", "algorithm.aggregation": "sequence"}
    assert keys_of(max_completion_length=64, learning_rate=1e-5) == {
        "rollout.max_tokens": 64,
        "training.lr": 1e-5,
    }


def test_a_server_of_vllm_corrects_for_its_log_probs_as_trl_does():
    keys = keys_of(use_vllm=True, vllm_mode="server", vllm_server_port=8001)
    assert keys == {
        "inference.name": "vllm",
        "inference.url": "http://127.0.0.1:8001",
        "algorithm.old_logprobs": "recomputed",
        "algorithm.correction": "sequence_icepop",
        "algorithm.correction_low": 0.0,
        "algorithm.correction_high": 3.0,
    }


def test_an_adapter_is_what_peft_says_it_is():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    wanted = {"model.lora.rank": 4, "model.lora.alpha": 16, "model.lora.targets": ["q_proj", "v_proj"]}
    assert keys_of(peft_config=config) == wanted
    with pytest.raises(ConfigError, match="lora_dropout"):
        keys_of(peft_config=peft.LoraConfig(target_modules="all-linear", lora_dropout=0.1))


@pytest.mark.parametrize(("said", "message"), [
    ({"top_entropy_quantile": 0.2}, "no counterpart in rl4llm. Instead"),
    ({"callbacks": ["x"]}, "metrics.jsonl"),
    ({"loss_type": "vespo"}, "loss_type"),
    ({"args": GRPOConfig("out", loss_type="cispo")}, "epsilon_high"),
    ({"use_vllm": True, "vllm_mode": "remote"}, "vllm_mode='remote'"),
    ({"num_generations": 7, "per_device_train_batch_size": 8}, "multiple of num_generations=7"),
    ({"num_generations": 8, "per_device_train_batch_size": 4, "generation_batch_size": 8}, "x gradient_accumulation_steps"),
    ({"lr_scheduler_type": "polynomial"}, "Accepted: constant"),
    ({"report_to": ["azure"]}, "report_to"),
    ({"save_strategy": "epoch"}, "Accepted: no, or steps"),
    ({"sync_ref_model": True, "beta": 0.1}, "ref_model_mixup_alpha"),
    ({"entropy_coef": 0.1, "loss_type": "grpo"}, "mean over tokens"),
    ({"optim": "adafactor"}, "AdamW"),
    ({"delta": 1.1}, "above 1 \\+ epsilon_high"),
    ({"steps_per_generation": 2, "generation_batch_size": 16}, "Set only one of them"),
    ({"args": object()}, "imported from rl4llm_compat.trl"),
    ({"args": DPOConfig("out")}, "another trainer"),
    ({"args": GRPOConfig("out", beta=0.1), "beta": 0.2}, "set twice"),
])  # fmt: skip
def test_what_cannot_be_said_is_refused_with_what_to_do(said, message):
    with pytest.raises(ConfigError, match=message):
        keys_of(**said)


def test_a_name_and_the_key_that_it_becomes_are_not_given_both():
    with pytest.raises(ConfigError, match=r"num_generations becomes rollout\.group_size, which is also set"):
        keys_of(num_generations=4, own={"rollout": {"group_size": 8}})
    with pytest.raises(ConfigError, match=r"becomes rollout\.prompts"):
        keys_of(GRPOConfig("out", per_device_train_batch_size=16), own={"rollout.prompts": 4})
    keys = keys_of(GRPOConfig("out"), own={"rollout": {"group_size": 4}})  # a default gives way
    assert "rollout.group_size" not in keys


def test_epochs_need_rows_that_can_be_counted():
    with pytest.raises(ConfigError, match="Set max_steps"):
        keys_of(GRPOConfig("out"), dataset="some/path")
    with pytest.raises(ConfigError, match="fewer than"):
        keys_of(GRPOConfig("out", per_device_train_batch_size=1024), dataset=PROMPTS)


def test_inert_names_are_warned_about_once_if_set():
    with pytest.warns(UserWarning, match="logging_steps .*every step is logged") as said:
        keys_of(GRPOConfig("out", max_steps=1, logging_steps=1, run_name=None, dataloader_num_workers=2))
    assert len(said) == 1
    assert "run_name" not in str(said[0].message)


def test_a_typing_error_in_a_config_is_found():
    with pytest.raises(ConfigError, match="Did you mean 'num_generations'"):
        GRPOConfig("out", num_generation=4)
    config = GRPOConfig(output_dir="out")
    with pytest.raises(ConfigError, match="learning_rat"):
        config.learning_rat = 1
    config.learning_rate = 1.0
    assert keys_of(config)["training.lr"] == 1.0
    assert config.num_generations == 8


def test_both_names_of_one_thing_are_refused(model_dir):
    with pytest.raises(ConfigError, match="train_dataset and dataset"):
        GRPOTrainer(str(model_dir), dataset=PROMPTS, train_dataset=PROMPTS)
    with pytest.raises(ConfigError, match="reward_funcs and reward_functions"):
        GRPOTrainer(str(model_dir), dataset=PROMPTS, reward_functions=[len], reward_funcs=[len])
    with pytest.raises(ConfigError, match="reward_weights has 2 numbers for 1"):
        GRPOTrainer(str(model_dir), train_dataset=PROMPTS, reward_funcs=len, reward_weights=[1, 2])


def test_texts_and_messages_are_not_mixed():
    with pytest.raises(DataError, match="row 1: the prompt is"):
        rows.prompts([{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}], True)


def test_reward_model_that_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    said = "reward_funcs='nobody/nothing': .*'nobody/nothing' cannot be loaded"
    with pytest.raises(ModelError, match=said):
        rewards.reward_functions("nobody/nothing", None, plain=False)
