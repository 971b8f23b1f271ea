"""Training on several environments: it runs, it learns in each, it resumes bit for bit, and ranks do not change it."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from ended_runs import metrics, weights
from forked_python import python
from mixture_parts import parts, rows

from rl4llm.api import GRPOTrainer, SFTTrainer
from rl4llm.cli import main
from rl4llm.config import load_config
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import ConfigError, RL4LLMError, RunDirError
from rl4llm.runs.checkpoint import latest_checkpoint

CONFIG = Path(__file__).parents[2] / "configs" / "mixture_grpo.yaml"
SMALL = {
    "rollout": {"prompts": 3, "group_size": 4, "max_tokens": 6}, "training": {"lr": 3e-3}, "checkpoint": {"every": 2},
    "eval": {"every": 0}, "deterministic": True, "tracking": {"tensorboard": False}, "curriculum": 0.2, "timeout_s": 60,
    "max_steps": 4,
}  # fmt: skip


def train(model_dir, directory, out, **options):
    own = options.pop("parts", None) or parts(directory)
    return GRPOTrainer(
        str(model_dir), parts=own, output={"dir": str(directory / out)}, **{**SMALL, **options}
    ).train()


def played(directory):
    """Return the samples of each prompt that every step played."""
    files = (directory / "episodes").glob("step-*.jsonl")
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {(row["step"], row.get("part", ""), row["prompt_id"], row["sample"]) for row in found}


def test_the_mixture_configuration_trains_end_to_end(model_dir, tmp_path):
    pytest.importorskip("reasoning_gym", reason="the package reasoning-gym is not installed")
    small = [
        "model.autocast=none", "rollout.prompts=4", "rollout.group_size=2", "rollout.max_tokens=6", "max_steps=2",
        "tracking.tensorboard=false", "checkpoint.every=0", "eval.limit=2", "eval.every=2", "curriculum=0.1",
        "parts.tools.env.describe_tools=false", "parts.tools.rollout.max_tokens=5", "parts.puzzles.rollout.max_tokens=4",
        "parts.puzzles.data.limit=8", "parts.puzzles.env.task=basic_arithmetic",
    ]  # fmt: skip
    assert (
        main(["train", str(CONFIG), *small, f"model.path={model_dir}", f"output.dir={tmp_path / 'run'}"]) == 0
    )
    steps = [row for row in metrics(tmp_path / "run") if "part/sums/share" in row]
    shares = [[row[f"part/{name}/share"] for name in ("sums", "tools", "puzzles")] for row in steps]
    assert shares == [[0.5, 0.25, 0.25]] * 2
    longest = [
        (row["part/sums/completion_length/max"], row["part/puzzles/completion_length/max"]) for row in steps
    ]
    assert all(sums <= 6 and puzzles <= 4 for sums, puzzles in longest)
    assert {"reward/reasoning_gym", "reward/math", "part/tools/reward/tool_use"} <= set(steps[0])
    held_out = metrics(tmp_path / "run", "eval.jsonl")[-1]
    assert [held_out[f"part/{name}/trajectories"] for name in ("sums", "tools", "puzzles")] == [2.0, 2.0, 2.0]


def test_both_parts_are_learned(model_dir, tmp_path):
    short = {"name": "length", "unit": "chars", "max_length": 1, "margin": 12}
    own = {
        "words": {"data": rows(tmp_path, "words", 2), "rewards": ["mixture_parts:Vowels"]},
        "talk": {"data": rows(tmp_path, "talk", 2), "rewards": [short]},
    }
    options = {
        "rollout": {"prompts": 4, "group_size": 16, "max_tokens": 8},
        "training": {"lr": 1e-2},
        "max_steps": 20,
    }
    train(model_dir, tmp_path, "run", parts=own, curriculum=None, **options)
    taught = metrics(tmp_path / "run")
    for name in own:
        rewards = [row[f"part/{name}/reward/mean"] for row in taught if f"part/{name}/reward/mean" in row]
        assert len(rewards) == 20
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, (name, rewards)


def test_a_killed_run_resumes_each_part_with_the_same_weights(model_dir, tmp_path):
    killer = tmp_path / "killer"
    config = {"model": {"path": str(model_dir)}, "parts": parts(tmp_path, str(killer)), **SMALL}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    def run(out):
        return python("-m", "rl4llm", "train", tmp_path / "config.yaml", f"output.dir={tmp_path / out}")

    assert run("whole").returncode == 0
    killer.touch()
    assert run("killed").returncode == -9
    assert latest_checkpoint(tmp_path / "killed" / "checkpoints").state["step"] == 2
    killer.unlink()
    assert run("killed").returncode == 0
    ends = [(tmp_path / out / "model" / "model.safetensors").read_bytes() for out in ("whole", "killed")]
    assert ends[0] == ends[1]
    assert played(tmp_path / "killed") == played(tmp_path / "whole")
    states = [
        latest_checkpoint(tmp_path / out / "checkpoints").state["prompts"] for out in ("whole", "killed")
    ]
    assert states[0] == states[1]
    assert sum(stream["consumed"] for stream in states[0]["parts"].values()) == 12


def weights_of(ranks, model_dir, directory, out):
    shared = {
        **SMALL,
        "rollout": {"prompts": 4 // ranks.size, "group_size": 4, "max_tokens": 6},
        "max_steps": 3,
    }
    run = train(model_dir, directory, out, **shared)
    return weights(run) if ranks.is_first else None


def test_two_ranks_end_with_the_same_weights_as_one(model_dir, tmp_path, on_ranks):
    from rl4llm.runtime.ranks import Ranks

    alone = weights_of(Ranks(), model_dir, tmp_path, "one")
    shared, _ = on_ranks(weights_of, model_dir, tmp_path, "two")
    assert played(tmp_path / "one") == played(tmp_path / "two")
    for name, tensor in alone.items():
        torch.testing.assert_close(
            tensor, shared[name], atol=1e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
    shares = [[row.get("part/talk/weight") for row in metrics(tmp_path / out)] for out in ("one", "two")]
    assert shares[0] == shares[1]


def test_a_new_weight_makes_another_run_but_eval_rows_do_not(model_dir, tmp_path):
    train(model_dir, tmp_path, "run", max_steps=1)
    changed = parts(tmp_path)
    changed["words"]["weight"] = 3
    with pytest.raises(RunDirError):
        train(model_dir, tmp_path, "run", parts=changed, max_steps=2)
    changed = parts(tmp_path)
    changed["words"]["eval"] = {"limit": 3}
    train(model_dir, tmp_path, "run", parts=changed, max_steps=2)


@pytest.mark.parametrize("override", [
    "parts.sums.dta.path=x", "parts.sums.data.pth=x", "parts.sums.rollout.max_token=5", "parts.sums.rollout.temperature=1",
    "parts.sums.rollout.max_tokens=0", "parts.sums.training.lr=1", "parts.sums=5", "parts=3",
])  # fmt: skip
def test_an_option_that_a_part_cannot_have_is_refused(override):
    with pytest.raises(ConfigError):
        load_config(CONFIG, [override])


def test_a_name_twice_and_a_curriculum_of_nothing_are_refused(tmp_path):
    (tmp_path / "twice.yaml").write_text(
        "model: {path: m}\nparts:\n  a: {weight: 1}\n  b: {weight: 2}\n  a: {weight: 3}\n"
    )
    with pytest.raises(ConfigError):
        load_config(tmp_path / "twice.yaml")
    with pytest.raises(ConfigError):
        load_config(overrides=["model.path=m", "data.path=d", "parts={a: {}}", "curriculum=level"])


BAD_ROWS = {
    "empty": b"",
    "broken": b'{"prompt": "a", "ground_truth": "b"}\n{"prompt": \n',
    "latin": '{"prompt": "é", "ground_truth": "b"}\n'.encode("latin-1"),
    "picture": b'{"prompt": "a", "ground_truth": "b", "image": "a.png"}\n',
    "missing": b'{"prompt": "a"}\n',
}
BAD_PARTS = [
    *({"weight": weight} for weight in (0, float("nan"))),
    {"data": {}},
    {"env": {"name": "tol"}},
    {"env": {"name": "chat", "max_stps": 2}},
    {"rewards": [{"name": "mth"}]},
    {"rollout": {"top_p": 0}},
]


@pytest.mark.parametrize("change", [*BAD_PARTS, *BAD_ROWS], ids=str)
def test_an_invalid_part_is_refused_before_anything_starts(change, model_dir, tmp_path):
    own = parts(tmp_path)
    if isinstance(change, str):
        (tmp_path / "bad.jsonl").write_bytes(BAD_ROWS[change])
        change = {"data": own["talk"]["data"] | {"path": str(tmp_path / "bad.jsonl")}}
    own["talk"] |= change
    with pytest.raises(RL4LLMError):
        train(model_dir, tmp_path, "run", parts=own)
    assert not (tmp_path / "run").exists()


def test_keys_of_one_environment_are_refused_beside_parts(model_dir, tmp_path):
    with pytest.raises(ConfigError):
        GRPOTrainer(
            str(model_dir), [{"messages": [], "ground_truth": ""}], parts=parts(tmp_path), max_steps=1
        )
    with pytest.raises(ConfigError):
        SFTTrainer(str(model_dir), parts=parts(tmp_path), max_steps=1)


class Even(BaseRewardFunction):
    """Give 1.0 for a reply of even length, always to the pool "solved"; it cannot score the pool "lost"."""

    success_at = 1.0

    def __init__(self, name="even"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, level, **kwargs) -> float:
        if level == "lost":
            raise ValueError("cannot be scored")
        return float(level == "solved" or len(messages[-1].content) % 2 == 0)


def test_pools_of_a_dataset_are_drawn_by_their_success(model_dir, tmp_path):
    levels = ["lost", *["open", "solved"] * 6]
    data = [
        {"messages": [{"role": "user", "content": f"Say {number}."}], "ground_truth": "", "level": level}
        for number, level in enumerate(levels)
    ]
    options = {
        "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 6, "max_failed_share": 1.0},
        "eval": {"every": 2}, "curriculum": "level", "max_steps": 6, "output": {"dir": str(tmp_path / "run")},
    }  # fmt: skip
    GRPOTrainer(
        str(model_dir), data, reward_functions=[Even()], eval_dataset=data[:4], **{**SMALL, **options}
    ).train()
    steps = [row for row in metrics(tmp_path / "run") if "part/solved/weight" in row]
    assert all(row["part/solved/success"] == 1.0 for row in steps)
    assert steps[-1]["part/open/weight"] > 2 * steps[-1]["part/solved/weight"] > 0
    assert any(row["part/lost/failures"] for row in steps if "part/lost/failures" in row)
    assert not any("part/lost/success" in row for row in steps), "a failed sample is neither right nor wrong"
    held_out = metrics(tmp_path / "run", "eval.jsonl")[-1]
    assert held_out["part/solved/accuracy"] == 1.0 and held_out["part/open/trajectories"] == 2.0


class ByLevel(Even):
    """Give what the level says, and in an open one what the length of the answer says."""

    def __call__(self, messages, ground_truth, level, **kwargs) -> float:
        return 0.0 if level == "hopeless" else super().__call__(messages, ground_truth, level, **kwargs)


def test_prompts_are_drawn_by_the_success_of_their_latest_group(model_dir, tmp_path):
    data = [
        {
            "messages": [{"role": "user", "content": f"Say {number}."}],
            "ground_truth": "",
            "level": ("open", "solved", "hopeless")[number % 3],
            "prompt_id": f"q{number}",
        }
        for number in range(12)
    ]

    def run(name, steps):
        options = {
            "rollout": {"prompts": 4, "group_size": 8, "max_tokens": 6, "max_staleness": 0},
            "curriculum": 0.05, "max_steps": steps, "output": {"dir": str(tmp_path / name)},
        }  # fmt: skip
        GRPOTrainer(str(model_dir), data, reward_functions=[ByLevel()], **{**SMALL, **options}).train()

    run("whole", 12)
    run("cut", 6)
    run("cut", 12)
    assert played(tmp_path / "cut") == played(tmp_path / "whole")
    later = Counter(int(prompt[1:]) % 3 for step, _, prompt, _ in played(tmp_path / "whole") if step > 4)
    assert later[0] > 2 * (later[1] + later[2])
    steps = [row for row in metrics(tmp_path / "whole") if "curriculum/skipped" in row]
    assert steps[0]["curriculum/skipped"] == 0.0 < steps[-1]["curriculum/skipped"]


def test_pools_are_refused_where_nothing_is_sampled(model_dir):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    with pytest.raises(ConfigError):
        SFTTrainer(str(model_dir), [{"messages": talk}], curriculum="level", max_steps=1)
