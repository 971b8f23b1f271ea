"""Training black-box agents: the configuration runs end to end with the program of the example, and repeats bit for bit."""

import json
import sys
from pathlib import Path

import httpx

from rl4llm.cli import main
from rl4llm.tracking.tracker import read_jsonl

ROOT = Path(__file__).parents[3]
CONFIG, EXAMPLE = ROOT / "configs" / "agent_grpo.yaml", ROOT / "examples" / "agent.py"
SMALL = [
    "rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=6", "model.autocast=none", "max_steps=2",
    "data.limit=4", "tracking.tensorboard=false", "checkpoint.every=0", "eval.every=0", "training.lr=1.0e-3",
    "rewards=[{name: length, unit: chars, max_length: 1, margin: 10}]",
    "algorithm.entropy_coef=1.0e-6",  # groups whose rewards are equal train too
]  # fmt: skip


def metrics_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "trajectories" in row]


def test_agent_config_trains_with_one_program_per_episode(model_dir, tmp_path, capsys):
    run = tmp_path / "run"
    own = f"env.command=[{sys.executable}, {EXAMPLE}, solve]", "max_steps=1"
    assert main(["train", str(CONFIG), *SMALL, *own, f"model.path={model_dir}", f"output.dir={run}"]) == 0
    for row in metrics_of(run):
        assert row["trajectories"] == 4.0 and row["env/requests"] == 2.0 and row["env/forks"] == 1.0
        assert row["env/trained_tokens"] == row["env/generated_tokens"] == row["completion_length/mean"] > 0
        assert row["update/tokens"] == 4 * row["env/trained_tokens"] and row["mismatch/max"] < 1e-4
    episodes = list(read_jsonl(run / "episodes" / "step-000001.jsonl"))
    assert len(episodes) == 4 and all(len(episode["forks"]) == 1 for episode in episodes)


def answers_twice(task, base_url, api_key):
    """Asks, shortens its history, and asks again."""
    for messages in (task["messages"], task["messages"][-1:]):
        asked = {"messages": messages, "temperature": 0.2}
        response = httpx.post(f"{base_url}/chat/completions", json=asked, trust_env=False, timeout=60)
    return response.json()["choices"][0]["message"]["content"]


def test_a_deterministic_run_with_agents_repeats_bit_for_bit(model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "agents_of_a_test", sys.modules[__name__])
    ends = []
    for name in ("one", "two"):
        run = tmp_path / name
        agent = ["env.command=null", "env.agent=agents_of_a_test:answers_twice", "deterministic=true"]
        assert (
            main(["train", str(CONFIG), *SMALL, *agent, f"model.path={model_dir}", f"output.dir={run}"]) == 0
        )
        ends.append((run / "model" / "model.safetensors").read_bytes())
    assert ends[0] == ends[1]
    assert "The agent's requests set 'temperature'" in capsys.readouterr().out
    assert metrics_of(run)[0]["env/forks"] == 1.0
