"""The types of the package, and those that users see."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_types_hold_in_the_package_and_in_what_users_write():
    pytest.importorskip("mypy", reason="needs mypy: pip install 'rl4llm[dev]'")
    command = [sys.executable, "-m", "mypy", "rl4llm", "tests/typed_user.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_benchmarks_import_and_call_what_exists():
    """The other types of the scripts are not checked."""
    pytest.importorskip("mypy", reason="needs mypy: pip install 'rl4llm[dev]'")
    command = [sys.executable, "-m", "mypy", "scripts/bench"]
    environment = {**os.environ, "MYPYPATH": "scripts/bench"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    codes = ("[attr-defined]", "[call-arg]", "[call-overload]", "[name-defined]")
    assert not [line for line in done.stdout.splitlines() if line.endswith(codes)]
