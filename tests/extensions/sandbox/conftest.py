"""One sandbox for the tests of this directory; where none can be had, they are skipped with the reason."""

import os
import shutil

import pytest

from rl4llm.extensions.sandbox import Limits, Sandbox


def needs_bubblewrap():
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed; scripts/install_sandbox.sh does it")


@pytest.fixture(scope="package")
def sandbox():
    """The strongest level of this machine, with time to spare."""
    needs_bubblewrap()
    made = Sandbox(limits=Limits(wall_s=20, total_s=40))
    yield made
    made.close()


@pytest.fixture(scope="package")
def sandbox_with_loopback():
    """One whose programs may talk to themselves over loopback."""
    needs_bubblewrap()
    made = Sandbox(loopback=True, slots=1, limits=Limits(wall_s=20, total_s=40))
    yield made
    made.close()


@pytest.fixture(scope="session")
def humaneval():
    """The rows of HumanEval; RL4LLM_HUMANEVAL names their file."""
    from rl4llm.data.read import read_rows

    path = os.environ.get("RL4LLM_HUMANEVAL")
    if not path:
        pytest.skip("RL4LLM_HUMANEVAL does not name a file with HumanEval's problems (.jsonl or .jsonl.gz)")
    return [row for _, row in read_rows(path, "test")]


@pytest.fixture(scope="session")
def _bubblewrap():
    needs_bubblewrap()
