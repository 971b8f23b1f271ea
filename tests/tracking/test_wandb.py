import os
import sys

import pytest

from rl4llm.core.errors import ConfigError
from rl4llm.tracking.wandb import WandbTracker, redacted

KEY = "0123456789abcdef0123456789abcdef01234567"


def test_keys_are_hidden_wherever_they_stand_and_ordinary_options_are_not():
    config = {
        "rollout": {"max_tokens": 8, "stop_token_ids": [1], "pad_token": "<pad>", "prompt_key": "question"},
        "rewards": [{"name": "judge", "api_key": KEY}, "math"],
        "wandb.api_key": KEY,
        "HF_TOKEN": KEY,
        "data": {"path": f"https://me:{KEY}@example.org/data"},
        "lr": 0.1,
    }
    shown = redacted(config)
    assert KEY not in str(shown)
    assert shown["rollout"] == config["rollout"]
    assert shown["rewards"][1] == "math" and shown["lr"] == 0.1
    assert shown["data"]["path"] == "https://(hidden)@example.org/data"


def test_without_the_extra_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"rl4llm\[wandb\]"):
        WandbTracker(tmp_path, "project", "run", {}, lambda text: None)


@pytest.mark.parametrize("key", [None, KEY])
def test_without_a_server_it_logs_offline_under_the_same_run_and_no_file_holds_the_key(tmp_path, monkeypatch, key):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(sys, "argv", ["train", f"judge.api_key={KEY}"])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    warnings = []
    for step in (1, 2):
        config = {"lr": 0.1, "api_key": KEY}
        tracker = WandbTracker(tmp_path / "run", "project", "run1", config, warnings.append, init_timeout_s=2.0)
        tracker.log(step, {"reward/mean": 0.5})
        tracker.close()
    assert len(warnings) == 2 and all("offline" in text for text in warnings)
    runs = [name for name in os.listdir(tmp_path / "run" / "wandb") if name.startswith("offline-run-")]
    assert runs and all("-run1" in name for name in runs)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(b"reward/mean" in path.read_bytes() for path in files)
    assert not any(KEY.encode() in path.read_bytes() for path in files)
    assert KEY not in str(warnings)
