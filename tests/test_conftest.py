"""What the configuration of the tests promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_python import python
from sweeps import sampled

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


COLLECTED = {
    "nothing_like_this": "import nothing_like_this",
    "Different tests were collected": "import os\nglobals()[f'test_{os.getpid()}'] = lambda: None",
}


@pytest.mark.parametrize("said", sampled(COLLECTED, ["Different tests were collected"]))
def test_what_cannot_be_collected_ends_the_tests_with_2(tmp_path, said):
    """With 1, .ci/run would run all tests again, and with different tests they would pass."""
    (tmp_path / "test_some.py").write_text(COLLECTED[said])
    (tmp_path / "test_other.py").write_text(f"def test():\n    open({str(tmp_path / 'ran')!r}, 'w')\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", str(TESTS.parent / "pytest.ini")]
    environ = os.environ | {"PYTHONPATH": str(TESTS)}
    words = [*command, "-n", "2", "--dist", "loadfile", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=environ, timeout=300, check=False)
    assert done.returncode == 2 and said in done.stdout, done.stdout
    assert not (tmp_path / "ran").exists()


def test_the_collector_spares_the_imports_of_programs_and_forks(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import gc; print(gc.get_threshold(), gc.get_freeze_count() > 100_000)")
    started = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert (started.stdout, python(program).stdout) == ("(20000, 10, 100) False\n", "(700, 10, 10) True\n")


def test_each_of_the_longest_files_exists(pytestconfig):
    longest = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py")).LONGEST
    names = [file.stem for file in TESTS.rglob("test_*.py")]
    assert [name for name in longest if name not in names] == [] and len(set(longest)) == len(longest)
