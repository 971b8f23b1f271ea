"""The types of the package, and those that users see."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = ("extras/compat/rl4llm_compat", "extras/tinker/rl4llm_tinker")


@pytest.fixture(scope="module")
def errors():
    """Return what mypy prints of the package, a user's file and the benchmarks: one start reads torch for all of them."""
    pytest.importorskip("mypy", reason="needs mypy: pip install 'rl4llm[dev]'")
    command = [sys.executable, "-m", "mypy", "rl4llm", *EXTRAS, "tests/typed_user.py", "scripts/bench"]
    environment = {**os.environ, "MYPYPATH": "scripts/bench"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error: " in line]


def test_the_types_hold_in_the_package_and_in_what_users_write(errors):
    assert not [line for line in errors if not line.startswith("scripts/bench/")]


def test_benchmarks_import_and_call_what_exists(errors):
    """The other types of the scripts are not checked."""
    codes = ("[attr-defined]", "[call-arg]", "[call-overload]", "[name-defined]")
    assert not [line for line in errors if line.endswith(codes)]
