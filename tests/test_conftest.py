"""What the configuration of the tests promises."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
DIFFERS = """
import random

def test_differs():
    draw = random.Random(0)
    assert draw.randbytes(300_000) == draw.randbytes(300_000)
"""


def test_long_values_that_differ_are_reported_at_once(tmp_path):
    """Pytest's full diff of them, which it makes where one of these variables is set, would take far longer."""
    (tmp_path / "test_differs.py").write_text(DIFFERS)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", str(TESTS.parent / "pytest.ini")]
    environ = os.environ | {"CI": "true", "BUILD_NUMBER": "1", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, env=environ, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "At index 0 diff" in done.stdout
