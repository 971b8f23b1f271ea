"""The script that breaks lines finds what it breaks, and tells a killed mutant from one that survived."""

import os
import subprocess
import sys
from pathlib import Path

from mutants import MUTANTS
from mutate import problems

ROOT = Path(__file__).parents[1]


def test_every_mutant_can_still_be_made_and_its_tests_exist():
    assert [problem for mutant in MUTANTS.values() for problem in problems(ROOT, mutant)] == []


JUDGES = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from mutants import Mutant
from mutate import judge

TESTS = ("tests/test_sums.py::test_sums",)
seen = Mutant("seen", "rl4llm/sums.py", "a + b", "a - b", TESTS)
unseen = Mutant("unseen", "rl4llm/sums.py", "a * b", "a / b", TESTS)
unreadable = Mutant("unreadable", "rl4llm/sums.py", "def add", "raise OSError\\n\\ndef add", TESTS)
for mutants in ([seen], [seen, unseen, unreadable]):
    print(judge(Path(sys.argv[1]), mutants, timeout_s=60), "is returned")
"""


def test_survivors_and_tests_that_cannot_start_fail_the_script(tmp_path):
    (tmp_path / "rl4llm").mkdir()
    (tmp_path / "rl4llm" / "__init__.py").touch()
    sums = "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return a * b\n"
    (tmp_path / "rl4llm" / "sums.py").write_text(sums)
    (tmp_path / "tests").mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "beside.py").write_text("three = 3")
    text = "from beside import three\nfrom rl4llm.sums import add, multiply\n\n\n"
    text += "def test_sums():\n    assert (add(2, 1), multiply(3, 1)) == (three, 3)\n"
    (tmp_path / "tests" / "test_sums.py").write_text(text)
    command = [sys.executable, "-c", JUDGES, str(tmp_path), str(ROOT / "scripts")]
    # The plugins take longer than all the rest.
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    killed, survived, _ = done.stdout.split("is returned")
    assert "1 mutants: 1 killed\n0 " in killed
    assert "3 mutants: 1 killed, 1 SURVIVED, 1 exit status 4\n1 " in survived
    assert "\n- a * b\n+ a / b\nTests: " in survived
