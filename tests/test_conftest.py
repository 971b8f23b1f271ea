"""What the configuration of the tests promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import sampled

TESTS = Path(__file__).parent
ROOT = TESTS.parent
COLLECTED = {
    "nothing_like_this": "import nothing_like_this",
    "Different tests were collected": "import os\nglobals()[f'test_{os.getpid()}'] = lambda: None",
}


@pytest.mark.parametrize("said", sampled(COLLECTED, ["Different tests were collected"]))
def test_what_cannot_be_collected_ends_the_tests_with_2(tmp_path, said):
    """With 1, .ci/run would run all tests again, and with different tests they would pass."""
    (tmp_path / "test_some.py").write_text(COLLECTED[said])
    (tmp_path / "test_other.py").write_text(f"def test():\n    open({str(tmp_path / 'ran')!r}, 'w')\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", str(ROOT / "pytest.ini")]
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{TESTS}"}
    words = [*command, "-n", "2", "--dist", "loadfile", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=environ, timeout=300, check=False)
    assert done.returncode == 2 and said in done.stdout, done.stdout
    assert not (tmp_path / "ran").exists()


def test_each_of_the_longest_files_exists(pytestconfig):
    plugin = pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    files = [file for folder in (TESTS, ROOT / "extras") for file in folder.rglob("test_*.py")]
    longest, names = plugin.LONGEST, [plugin.name_of(file) for file in files]
    assert [name for name in longest if name not in names] == [] and len(set(longest)) == len(longest)
