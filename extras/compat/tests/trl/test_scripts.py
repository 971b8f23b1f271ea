"""Scripts that import `trl` run unchanged: their names, their command lines, and what is refused before training."""

import json
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from forked_python import python
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rl4llm.core.errors import ConfigError
from rl4llm_compat.trl import (
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    ModelConfig,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    functions,
    get_quantization_config,
)
from rl4llm_compat.trl.run import objections, run_script
from rl4llm_compat.trl.script import Script

ROOT = Path(__file__).parents[4]
SMALL = {
    "per_device_train_batch_size": 4,
    "max_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
}
LABELS = [
    {
        "prompt": [{"role": "user", "content": "How many"}],
        "completion": [{"role": "assistant", "content": "coins"}],
        "label": ok,
    }
    for ok in (True, False) * 2
]

GRPO = """
import argparse
from dataclasses import dataclass, field

from datasets import load_dataset

from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import get_soft_overlong_punishment, think_format_reward


@dataclass
class Arguments(ScriptArguments):
    bonus: list[float] | None = field(default=None, metadata={"help": "added"})


def shorter(completions, tag, log_metric, log_extra, **columns):
    log_metric("share_of_tags", 0.25)
    log_extra("tag", tag)
    return [-float(len(said[0]["content"])) for said in completions]


if __name__ == "__main__":
    script, training, model = TrlParser((Arguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    assert script.bonus == [0.5, 1.0]
    training.model_init_kwargs = {"revision": model.model_revision, "dtype": model.dtype}
    rows = load_dataset(script.dataset_name, split=script.dataset_train_split)
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=[shorter, think_format_reward, get_soft_overlong_punishment(8, 4)],
        args=training,
        train_dataset=rows,
        eval_dataset=rows,
        peft_config=get_peft_config(model),
    )
    result = trainer.train()
    trainer.accelerator.print("trained", result.global_step, trainer.args.beta)
    first, *_, last = trainer.state.log_history
    assert "eval_reward" in first and last["train_loss"] == result.training_loss == result.metrics["train_loss"]
    assert any({"reward", "rewards/shorter/mean", "share_of_tags", "learning_rate"} <= row.keys()
               for row in trainer.state.log_history)
    assert len(trainer.train_dataset) == len(trainer.eval_dataset) == 8
    trainer.save_state()
    trainer.processing_class.save_pretrained(training.output_dir)
    trainer.save_model(training.output_dir)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
"""

GAME = '''
import sys

from datasets import Dataset
from forked_python import python

from trl import GRPOConfig, GRPOTrainer

PROMPTS = []


class Counter:
    def reset(self, start, **columns):
        self.count = start
        return f" It is {start}."

    def add(self, number: int) -> str:
        """
        Add a number.

        Args:
            number: Which one.
        """
        self.count += number
        return str(self.count)


def score(prompts, environments, **columns):
    PROMPTS.extend(prompts)
    return [float(counter.count) for counter in environments]


trainer = GRPOTrainer(
    model=sys.argv[1],
    train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "Count."}]] * 8, "start": range(8)}),
    reward_funcs=score,
    args=GRPOConfig(
        "out", chat_template_kwargs={"enable_thinking": False}, max_completion_length=8, max_tool_calling_iterations=2,
        num_generations=2, per_device_train_batch_size=4, max_steps=1, bf16=False, gradient_checkpointing=False,
    ),
    environment_factory=Counter,
)
trainer.train()
'''


def write(place, text, name="script.py"):
    (place / name).write_text(text)
    return place / name


def test_script_runs_unchanged_from_the_command_line(place, model_dir):
    (place / "rows").mkdir()
    row = {"prompt": [{"role": "user", "content": "How many coins"}], "tag": "a"}
    (place / "rows" / "train.jsonl").write_text((json.dumps(row) + "\n") * 8)
    (place / "config.yaml").write_text(
        "env: {SAID: hello}\nbeta: 0.25\nlearning_rate: 1.0e-3\nbonus: [0.5, 1.0]\nreport_to: none\n"
    )
    words = (
        f"--config config.yaml --dataset_name rows --model_name_or_path {model_dir} --output_dir out --max_steps 1 "
        "--per_device_train_batch_size 4 --num_generations 2 --max_completion_length 8 --bf16 False --eval_strategy steps "
        "--eval_steps 1 --use_peft --lora_dropout 0 --no_gradient_checkpointing --beta 0"
    ).split()
    script = write(place, GRPO)
    done = python("-m", "rl4llm", "run", script, *words, cwd=place)
    assert done.returncode == 0, done.stderr
    assert "trained 1 0" in done.stdout
    config = (place / "out" / "config.yaml").read_text()
    assert "lr: 0.001" in config
    assert "rank: 16" in config
    logged = [json.loads(line) for line in (place / "out" / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("env/share_of_tags") == 0.25 for row in logged)
    measured = json.loads((place / "out" / "eval_results.json").read_text())
    assert any(name.startswith("eval_") for name in measured)
    assert json.loads((place / "out" / "trainer_state.json").read_text())["global_step"] == 1
    assert (place / "out" / "model.safetensors").exists()


def test_environment_factory_gives_each_episode_an_object(place, model_dir):
    run_script(write(place, GAME), [str(model_dir)])
    rows = [
        json.loads(line) for path in place.glob("out/**/*.jsonl") for line in path.read_text().splitlines()
    ]
    starts = {message["content"] for row in rows for message in row.get("messages", [])[:1]}
    assert len(starts) == 2
    assert all(re.fullmatch(r"Count\. It is [0-7]\.", start) for start in starts)


def test_environment_without_a_dataset_brings_the_prompts(place, model_dir):
    """As in TRL, `max_steps` is then the length of the run."""
    text = (
        re.sub("    train_dataset=.*\n", "", GAME)
        .replace("start, **columns", "**columns")
        .replace(
            'self.count = start\n        return f" It is {start}."',
            "self.count = 0\n        return 'Count from 0.'",
        )
    )
    run_script(write(place, text), [str(model_dir)])
    (episodes,) = place.glob("out/episodes/*.jsonl")
    firsts = [json.loads(line)["messages"][0]["content"] for line in episodes.read_text().splitlines()]
    assert len(firsts) == 4 and set(firsts) == {"Count from 0."}


def test_changing_the_import_is_enough(place, model_dir):
    text = GAME.replace("from trl import", "from rl4llm_compat.trl import")
    script = write(place, text)
    done = python(script, model_dir, cwd=place)
    assert done.returncode == 0, done.stderr
    assert (place / "out" / "metrics.jsonl").exists()


def test_kto_takes_its_reference_by_position(place, model_dir):
    model, ref_model = (AutoModelForCausalLM.from_pretrained(model_dir) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rows = Dataset.from_list(LABELS)
    args = KTOConfig("out", **SMALL)
    trainer = KTOTrainer(model, ref_model, args=args, train_dataset=rows, processing_class=tokenizer)
    assert len(trainer.trainer.dataset) == 4
    trainer.trainer.close()
    ref_model.config._name_or_path = "another"
    with pytest.raises(ConfigError, match="ref_model='another' is not the trained model"):
        KTOTrainer(model, ref_model, args=args, train_dataset=rows, processing_class=tokenizer)


def test_reward_trainer_takes_a_classifier_new_or_trained(place, model_dir):
    row = {
        "chosen": [{"role": "user", "content": "How"}, {"role": "assistant", "content": "coins"}],
        "rejected": [{"role": "user", "content": "How"}, {"role": "assistant", "content": "Answer"}],
    }
    model = AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1)
    trainer = RewardTrainer(model, RewardConfig("out", **SMALL), train_dataset=[row] * 4)
    assert trainer.config.model.path == str(model_dir)
    trainer.trainer.close()
    model.save_pretrained(place / "scored")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(place / "scored")
    trained = AutoModelForSequenceClassification.from_pretrained(place / "scored")
    trainer = RewardTrainer(trained, RewardConfig("out2", **SMALL), train_dataset=[row] * 4)
    assert torch.equal(trainer.trainer.backend.value_head.linear.weight, model.score.weight)
    trainer.trainer.close()
    with pytest.raises(ConfigError, match="cannot generate"):
        KTOTrainer(trained, args=KTOConfig("out3", **SMALL), train_dataset=Dataset.from_list(LABELS))


def test_names_of_trl_without_args_have_its_defaults():
    keys = Script("grpo", {"reward_funcs": len, "train_dataset": [{"prompt": "a"}] * 8}).keys(None, {})
    assert keys["algorithm.aggregation"] == "token"
    assert keys["training.schedule"] == "linear"
    assert keys["rollout.max_tokens"] == 512
    assert keys["max_steps"] == 24
    own = Script("grpo", {"reward_funcs": len, "train_dataset": "rows.jsonl"}).keys(None, {"max_steps": 3})
    assert "max_steps" not in own
    assert "training.schedule" not in Script("grpo", {"num_generations": 4}).keys([{"prompt": "a"}] * 8, {})
    from_file = Script("grpo", {"reward_funcs": len, "train_dataset": [{"prompt": "a"}] * 8}, configured=True)
    assert from_file.keys(None, {}) == {}


def test_a_bound_of_tool_calls_needs_tools():
    given = {"args": GRPOConfig("out", max_tool_calling_iterations=3), "train_dataset": [{"prompt": "a"}] * 8}
    assert "env.max_steps" not in Script("grpo", {**given}).keys(None, {})
    assert Script("grpo", {**given, "tools": [len]}).keys(None, {})["env.max_steps"] == 4


def test_rloo_is_reinforce_with_the_penalty_in_the_reward():
    keys = Script("rloo", {"args": RLOOConfig("out"), "train_dataset": [{"prompt": "a"}] * 64}).keys(None, {})
    wanted = {
        "rollout.group_size": 2, "algorithm.kl_coef": 0.05, "algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1",
        "algorithm.aggregation": "constant", "training.constant_length": 1, "algorithm.scale_rewards": "none",
    }  # fmt: skip
    assert wanted.items() <= keys.items()


def test_colocated_vllm_is_the_embedded_engine():
    with pytest.warns(UserWarning, match="the embedded engine samples"):
        assert Script("grpo", {"use_vllm": True}).keys([{"prompt": "a"}] * 8, {}) == {}


def test_positional_arguments_of_trl_are_read_in_its_order(place, model_dir):
    rows = [{"prompt": "How many coins"}] * 8
    args = GRPOConfig("out", num_generations=2, max_completion_length=4, **SMALL)
    trainer = GRPOTrainer(
        str(model_dir), [lambda completions, **columns: [0.0] * len(completions)], args, iter(rows)
    )
    assert len(trainer.trainer.rollout.env.dataset) == 8
    trainer.trainer.close()
    with pytest.raises(ConfigError, match="args is given by position and by name"):
        GRPOTrainer(str(model_dir), len, args, rows, args=args)
    with pytest.raises(ConfigError, match="TRL's order is: model, reward_funcs, args, train_dataset"):
        GRPOTrainer(str(model_dir), len, args, rows, rows)


def test_quantized_weights_are_refused():
    with pytest.raises(ConfigError, match="load_in_4bit has no counterpart"):
        get_quantization_config(ModelConfig(load_in_4bit=True))
    assert get_quantization_config(ModelConfig()) is None


@pytest.mark.parametrize(("text", "why"), [
    ("from trl.experimental.online_dpo import OnlineDPOTrainer", "trl.experimental.online_dpo has no counterpart"),
    ("from trl import PPOConfig", "trl.PPOConfig has no counterpart .* algorithm.critic_lr"),
    ("trainer.push_to_hub(dataset_name='a')", "script.py:1: push_to_hub has no counterpart: .* --no-push"),
    ("from unsloth import FastLanguageModel", "script.py:1: unsloth changes trl itself"),
    ("this is no script", "is not a Python script: invalid syntax"),
    ("import a_package_that_nobody_has", "needs the package 'a_package_that_nobody_has', which is not installed"),
])  # fmt: skip
def test_script_is_refused_before_it_trains(place, text, why):
    with pytest.raises(ConfigError, match=why.replace(" .* ", ".*")):
        run_script(write(place, text), [])


def test_an_upload_that_its_argument_decides_is_no_objection(place):
    text = "if training_args.push_to_hub:\n    trainer.push_to_hub()\n"
    assert list(objections(write(place, text), push=True)) == []
    assert list(objections(write(place, "trainer.push_to_hub()"), push=False)) == []


def test_modules_of_trl_have_its_names(place):
    text = """
import trl
import trl.trainer.utils
from trl.rewards import accuracy_reward
from trl.scripts.utils import ScriptArguments
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

assert trl.GRPOTrainer is GRPOTrainer
assert GRPOConfig.__module__ == "rl4llm_compat.trl.arguments"
assert __name__ == "__main__"
"""
    run_script(write(place, text), [])


def test_rewards_of_trl_score_as_documented_there():
    said = [
        [{"role": "assistant", "content": text}]
        for text in (r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}", "?")
    ]
    truth = [r"\frac{1}{3}"] * 3
    assert functions.accuracy_reward(said, truth) == [1.0, 0.0, 0.0]
    assert functions.accuracy_reward(said[:1], [""]) == [None]
    thought = [[{"content": f"<think> a </think> {one[0]['content']}"}] for one in said[:2]]
    assert functions.reasoning_accuracy_reward([*thought, said[0]], truth) == [1.0, 0.0, 0.0]
    assert functions.think_format_reward([*thought, said[0], [{"content": "<think><think></think>"}]]) == [
        1,
        1,
        0,
        0,
    ]
    scaled = functions.get_cosine_scaled_reward(max_len=100)
    assert scaled(said[:2], truth[:2], [[1] * 50] * 2) == pytest.approx([0.75, -0.75])
    assert scaled(said[:2], truth[:2], [[]] * 2) == pytest.approx([1.0, -1.0])
    assert scaled(said[:2], truth[:2], [[1] * 200] * 2) == pytest.approx([0.5, -0.5])
    long = functions.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    assert long([[1] * 80, [1] * 90, [1] * 100, [1] * 101]) == [0.0, -0.5, -1.0, -1.0]
    repeated = functions.get_repetition_penalty_reward(ngram_size=2)
    assert repeated([[1, 2, 3, 4], [5] * 5, [1]]) == [0.0, -0.75, 0.0]


def test_the_example_learns_with_the_names_of_trl(tmp_path):
    done = python(ROOT / "examples" / "from_trl.py", "--steps", "20", "--output", tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(rewards) == 20 and sum(rewards[-4:]) > sum(rewards[:4])
