"""The script with two machines runs, where that is asked for: it takes a quarter of an hour, root and SGLang."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "two_machines.py"


def test_a_server_is_added_and_removed_while_two_machines_train(tmp_path):
    model = os.environ.get("RL4LLM_TWO_MACHINES")
    if not model:
        pytest.skip(
            "RL4LLM_TWO_MACHINES does not name a warmed-up model of the quickstart; it takes a quarter of an hour"
        )
    command = [sys.executable, str(SCRIPT), "--model", model, "--dir", str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a server is added" in done.stdout
    assert "a server is removed" in done.stdout
