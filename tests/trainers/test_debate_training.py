"""Training with several roles: the configuration runs and resumes, each role learns from its own comparison or not."""

import json
from pathlib import Path

import pytest
from ended_runs import metrics
from vowels import prompts

from rl4llm import GRPOTrainer, RolesEnv
from rl4llm.cli import main
from rl4llm.core.errors import ConfigError, TooManyFailuresError, UnreachableError
from rl4llm.extensions.judges.judges import BaseJudge

CONFIG = Path(__file__).parents[2] / "configs" / "debate_grpo.yaml"
SMALL = [
    "rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=6", "model.autocast=none", "max_steps=2",
    "tracking.tensorboard=false", "eval.limit=2", "eval.every=2", "checkpoint.every=1", "deterministic=true",
    "env.instructions={pro: Answer., con: Object.}", "training.lr=1e-3", "training.warmup_steps=0",
    "rewards=[{name: winner, by: {name: length, unit: chars, min_length: 3, max_length: 99, margin: 3}}]",  # no verifiers
]  # fmt: skip
QUIET = {"deterministic": True, "tracking.tensorboard": False, "checkpoint.every": 0}


def episodes(directory, name):
    return [json.loads(line) for line in (directory / "episodes" / name).read_text().splitlines()]


def weights(directory):
    return (directory / "model" / "model.safetensors").read_bytes()


class Talk(RolesEnv):
    """Two turns each, about nothing."""

    roles = ("pro", "con")


class Vowels(BaseJudge):
    """Who used the larger share of vowels has won; `con_earns` is what con gets in any case."""

    con_earns = None

    def __init__(self, name="vowels", **kwargs):
        super().__init__(name)

    def judge(self, transcript, ground_truth, **columns):
        said = {
            role: "".join(line.text.lower() for line in transcript if line.role == role)
            for role in Talk.roles
        }
        shares = {
            role: sum(letter in "aeiou" for letter in text) / max(len(text), 1) for role, text in said.items()
        }
        if self.con_earns is not None:
            return {"pro": shares["pro"], "con": self.con_earns(said["con"])}
        lead = shares["pro"] - shares["con"]
        return {
            "pro": 0.5 + 0.5 * (lead > 0) - 0.5 * (lead < 0),
            "con": 0.5 + 0.5 * (lead < 0) - 0.5 * (lead > 0),
        }


def train(model_dir, directory, rewards=None, algorithm=None, **options):
    settings = {
        "max_steps": 2,
        "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 6},
        "training.lr": 3e-3,
        "algorithm": algorithm or {"name": "grpo"},
        **QUIET,
        **options,
    }
    rewards = rewards or [Vowels()]
    return GRPOTrainer(
        str(model_dir), prompts(4), rewards, env=Talk, output={"dir": str(directory)}, **settings
    ).train()


def test_the_debate_configuration_trains_both_roles_and_resumes(model_dir, tmp_path):
    base = [*SMALL, f"model.path={model_dir}"]
    assert main(["train", str(CONFIG), *base, f"output.dir={tmp_path / 'whole'}"]) == 0
    assert main(["train", str(CONFIG), *base, f"output.dir={tmp_path / 'parts'}", "max_steps=1"]) == 0
    assert main(["train", str(CONFIG), *base, f"output.dir={tmp_path / 'parts'}"]) == 0
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")
    (first, *_) = [row for row in metrics(tmp_path / "whole") if "trajectories" in row]
    assert first["trajectories"] == 8
    assert first["role/pro/trajectories"] == first["role/con/trajectories"] == 4
    assert {"reward/winner", "role/con/reward/winner", "role/con/turns"} <= first.keys()
    rows = episodes(tmp_path / "whole", "step-000001.jsonl")
    assert [(row["role"], row["frozen"]) for row in rows] == [("pro", False)] * 2 + [("con", False)] * 2 + [
        ("pro", False)
    ] * 2 + [("con", False)] * 2
    (held_out,) = [row for row in metrics(tmp_path / "whole") if "eval/trajectories" in row][:1]
    assert held_out["eval/role/con/trajectories"] == 2


def test_the_policy_learns_to_win_against_a_frozen_model(model_dir, tmp_path):
    rival = {"con": {"name": "model", "path": str(model_dir)}}
    rollout = {"prompts": 4, "group_size": 16, "max_tokens": 6}
    options = {
        "max_steps": 12,
        "rollout": rollout,
        "training.lr": 4e-3,
        "env.opponents": rival,
        "env.max_steps": 1,
    }
    train(model_dir, tmp_path / "run", **options)
    rewards = [row["role/pro/reward/mean"] for row in metrics(tmp_path / "run") if "reward/mean" in row]
    assert not any("role/con/reward/mean" in row for row in metrics(tmp_path / "run"))
    assert 0.35 < rewards[0] < 0.65
    assert sum(rewards[-3:]) / 3 > 0.7


def test_a_frozen_roles_reward_is_logged_and_changes_no_weight(model_dir, tmp_path):
    def run(name, con_earns, **options):
        judge = Vowels()
        judge.con_earns = con_earns
        train(model_dir, tmp_path / name, rewards=[judge], **options).save_pretrained(
            tmp_path / name / "model"
        )
        return weights(tmp_path / name)

    frozen = {"env.frozen": ["con"], "max_steps": 1}
    assert run("short", len, **frozen) == run("long", lambda text: -len(text), **frozen)
    assert run("short-trained", len, max_steps=1) != run("long-trained", lambda text: -len(text), max_steps=1)
    (row,) = [row for row in metrics(tmp_path / "short") if "reward/mean" in row]
    assert row["trajectories"] == row["role/con/trajectories"] == 16
    assert row["reward/mean"] == row["role/pro/reward/mean"] != row["role/con/reward/mean"]
    assert {
        item["frozen"] for item in episodes(tmp_path / "short", "step-000001.jsonl") if item["role"] == "con"
    } == {True}


def test_dynamic_sampling_fills_every_prompt_and_role(model_dir, tmp_path):
    judge = Vowels()
    judge.con_earns = lambda text: 1.0  # all alike: never kept
    train(
        model_dir, tmp_path, rewards=[judge], algorithm={"name": "dapo", "resampling_rounds": 2}, max_steps=1
    )
    (row,) = [row for row in metrics(tmp_path) if "reward/mean" in row]
    assert row["groups/refills"] == 2  # 4 prompts x 2 roles are never reached, with 4, 2 and 1 groups kept
    assert row["trajectories"] == 4 * 2 * (4 + 2 + 1)


def test_a_missing_server_is_found_before_anything_starts(model_dir, tmp_path):
    gone = {"con": {"url": "http://127.0.0.1:9/v1", "model": "rival", "attempts": 1}}
    with pytest.raises(UnreachableError):
        train(model_dir, tmp_path / "run", **{"env.opponents": gone})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def loses_its_voice(messages):
    raise OSError("gone")


@pytest.mark.parametrize(
    "opponents",
    [
        {"con": {"name": "sevrer", "url": "x"}},
        {"con": {"urll": "x"}},
        {"con": 7},
        {"judge": "test_debate_training:loses_its_voice"},
        {"con": "no.such.module:it"},
    ],
)
def test_invalid_opponents_are_refused_before_anything_starts(model_dir, tmp_path, opponents, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(ConfigError):
        train(model_dir, tmp_path / "run", **{"env.opponents": opponents})


def test_an_opponent_that_always_fails_stops_the_run(model_dir, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    opponents = {"con": "test_debate_training:loses_its_voice", "pro": "policy"}
    with pytest.raises(TooManyFailuresError):
        train(model_dir, tmp_path / "run", **{"env.opponents": opponents})
