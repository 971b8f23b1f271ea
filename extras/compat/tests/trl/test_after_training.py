"""What scripts of TRL do with a trained model: its log, its metrics, and the evaluation of other rows."""

import json

import pytest
from peft import LoraConfig

from rl4llm.core.errors import ConfigError
from rl4llm_compat.trl import (
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from rl4llm_compat.trl.history import history

SMALL = {
    "per_device_train_batch_size": 2, "bf16": False, "gradient_checkpointing": False, "use_cpu": True,
    "learning_rate": 1e-2,
}  # fmt: skip
ROWS = [{"prompt": "How many", "completion": f" {number} coins"} for number in range(4)]
PAIRS = [{"chosen": f"{number} coins", "rejected": f"{number} keys"} for number in range(4)]


@pytest.mark.parametrize(
    ("kind", "config", "rows"),
    [(SFTTrainer, SFTConfig, ROWS), (RewardTrainer, RewardConfig, PAIRS)],
    ids=["answers", "pairs"],
)
def test_trained_trainer_has_the_numbers_that_scripts_read(kind, config, rows, model_dir, tmp_path):
    args = config(str(tmp_path), num_train_epochs=1, eval_strategy="steps", eval_steps=1, **SMALL)
    trainer = kind(model=str(model_dir), args=args, train_dataset=iter(rows), eval_dataset=rows[:3])
    before = trainer.evaluate(rows[:3])
    result = trainer.train()
    *rest, total = trainer.state.log_history
    losses = [row["loss"] for row in rest if "loss" in row]
    assert result.metrics["train_loss"] == total["train_loss"] == sum(losses) / 2
    assert (result.global_step, result.metrics["epoch"], total["step"]) == (2, 1.0, 2)
    measured = [row["eval_loss"] for row in rest if "eval_loss" in row]
    assert before["eval_loss"] == pytest.approx(measured[0], rel=1e-5)
    assert measured[0] != measured[-1] == trainer.evaluate()["eval_loss"]
    both = trainer.evaluate({"a": rows[:3], "b": rows[3:]}, metric_key_prefix="test")
    assert both["test_a_loss"] == pytest.approx(measured[-1], rel=1e-5)
    assert both["test_b_loss"] != both["test_a_loss"]
    assert len(trainer.train_dataset) == 4
    assert len(trainer.eval_dataset) == 3
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("test", both)
    assert json.loads((tmp_path / "all_results.json").read_text()) == {**result.metrics, **both}


def test_held_out_rows_are_measured_when_a_script_asks(model_dir, tmp_path):
    args = SFTConfig(str(tmp_path), max_steps=1, **SMALL)
    trainer = SFTTrainer(model=str(model_dir), args=args, train_dataset=ROWS, eval_dataset=ROWS[:2])
    trainer.train()
    assert trainer.evaluate() == trainer.evaluate(ROWS[:2])
    with pytest.raises(
        ConfigError, match=r"push_to_hub has no counterpart in rl4llm. Instead: the model is in output_dir"
    ):
        trainer.push_to_hub()


def no_longer(completions, wanted, **columns):
    """A reward of the answer and of the row that it answers."""
    return [number * 100.0 + len(text) for text, number in zip(completions, wanted, strict=True)]


@pytest.mark.parametrize(
    ("kind", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)], ids=["grpo", "rloo"]
)
def test_sampling_trainers_evaluate_other_prompts(kind, config, model_dir, tmp_path):
    rows = [{"prompt": f"{number} coins", "wanted": number} for number in range(8)]
    options = {"num_generations": 2, "max_completion_length": 4, "max_steps": 1, "learning_rate": 1.0}
    trainer = kind(
        model=str(model_dir),
        reward_funcs=no_longer,
        args=config(str(tmp_path), **SMALL | options),
        train_dataset=rows[:4],
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    before = trainer.evaluate(iter(rows[4:]))
    assert trainer.evaluate(rows[4:]) == before
    assert 550 < before["eval_reward"] == before["eval_rewards/no_longer/mean"] < 650
    assert before["eval_trajectories"] == 4
    trainer.train()
    logged = sorted(path.read_bytes() for path in tmp_path.rglob("*.jsonl"))
    after = trainer.evaluate({"a": rows[4:], "b": rows[:1]}, metric_key_prefix="test")
    assert after["test_a_surprise"] != before["eval_surprise"]
    assert 0 <= after["test_b_reward"] < 50
    assert logged == sorted(path.read_bytes() for path in tmp_path.rglob("*.jsonl"))
    with pytest.raises(ConfigError, match=r"trainer.evaluate\(\) has no data set. Next: pass one to it"):
        trainer.evaluate()


def test_log_has_the_names_of_trl():
    rows = [
        {"step": 0, "eval/reward/mean": 0.25},
        {
            "step": 1, "loss": 0.5, "lr": 0.1, "reward/mean": 1.0, "reward/kl": 0.0, "reward/math": 2.0, "env/mine": 3.0,
            "time/step": 4.0,
        },
        {"step": 2, "loss": None, "time/step": 4.0},
    ]  # fmt: skip
    measured, first, _, total = history(rows, 0.5, finished=True)
    assert measured == {"eval_reward": 0.25, "epoch": 0.0, "step": 0}
    assert first == {
        "loss": 0.5, "learning_rate": 0.1, "reward": 1.0, "reward/kl": 0.0, "rewards/math/mean": 2.0, "mine": 3.0,
        "step_time": 4.0, "epoch": 0.5, "step": 1,
    }  # fmt: skip
    assert (total["train_loss"], total["train_runtime"], total["epoch"]) == (0.5, 8.0, 1.0)
    assert history(rows[:1], 0.5, finished=True) == [measured]
