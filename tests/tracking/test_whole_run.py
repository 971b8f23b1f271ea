"""A real run with every tracker that is installed, made sick on purpose: its reward never differs."""

import importlib.util
import json

from rl4llm import GRPOTrainer
from rl4llm.extensions.view.run import find_runs

ROWS = [{"messages": [{"role": "user", "content": f"Say {n}."}], "ground_truth": str(n)} for n in range(16)]
HELD_OUT = [
    {"messages": [{"role": "user", "content": f"Say no {n}."}], "ground_truth": "no"} for n in range(2)
]
EXTRAS = [name for name in ("wandb",) if importlib.util.find_spec(name)]


def test_equal_rewards_raise_an_alert_and_episodes_are_logged(model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = tmp_path / "run"
    overrides = {f"tracking.{name}": True for name in EXTRAS}
    GRPOTrainer(
        model=model_dir,
        dataset=ROWS,
        reward_functions=[lambda completions, **columns: [0.0] * len(completions)],
        eval_dataset=HELD_OUT,
        max_steps=5,
        rollout={"prompts": 16, "group_size": 2, "max_tokens": 2},
        training={"lr": 1e-6},
        eval={"every": 5},
        output={"dir": str(run)},
        **overrides,
    ).train()
    rows = [json.loads(line) for line in (run / "alerts.jsonl").read_text().splitlines()]
    assert {row["name"] for row in rows} == {"constant reward", "everything truncated"}  # after two tokens
    assert all(row["until"] is None and row["since"] == 1 for row in rows)
    assert {alert["name"] for alert in find_runs([str(run)])[0].about()["alerts"]} == {
        row["name"] for row in rows
    }
    assert any(path.stat().st_size for path in run.glob("events.out.tfevents.*"))
    if "wandb" in EXTRAS:
        assert list((run / "wandb").glob("offline-run-*/files/media/table/eval/*.json"))
