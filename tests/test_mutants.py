"""The script that breaks lines finds what it breaks, and tells a killed mutant from one that survived."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS
from mutate import problems

ROOT = Path(__file__).parents[1]


def test_every_mutant_can_still_be_made_and_its_tests_exist():
    assert [problem for mutant in MUTANTS.values() for problem in problems(ROOT, mutant)] == []


def test_important_lines_of_every_package_are_broken():
    packages = [
        mutant.file.removeprefix("rl4llm/extensions/servers/").split("/")[-2] for mutant in MUTANTS.values()
    ]
    assert len(packages) >= 60
    assert all(packages.count(name) >= 10 for name in ("algorithms", "data", "trainers", "envs"))
    assert packages.count("sync") + packages.count("extensions") >= 10


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


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    (root / "rl4llm").mkdir()
    (root / "rl4llm" / "__init__.py").touch()
    (root / "rl4llm" / "sums.py").write_text(
        "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return a * b\n"
    )
    (root / "tests").mkdir()
    text = "from rl4llm.sums import add, multiply\n\n\ndef test_sums():\n    assert (add(2, 1), multiply(3, 1)) == (3, 3)\n"
    (root / "tests" / "test_sums.py").write_text(text)
    command = [sys.executable, "-c", JUDGES, str(root), str(ROOT / "scripts")]
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take longer than all the rest
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("is returned")


def test_when_every_mutant_is_killed_the_script_succeeds(judged):
    assert "1 mutants: 1 killed\n0 " in judged[0]


def test_a_survivor_is_shown_and_fails_the_script(judged):
    assert "3 mutants: 1 killed, 1 SURVIVED, 1 exit status 4\n1 " in judged[1]
    assert "\n- a * b\n+ a / b\nTests: " in judged[1]


def test_a_mutant_that_keeps_tests_from_starting_is_not_killed(judged):
    assert "\nexit status 4             unreadable" in judged[1]


def test_a_fragment_that_is_gone_is_named(tmp_path):
    mutant = next(iter(MUTANTS.values()))
    assert list(problems(tmp_path, mutant)) == [
        f"{mutant.name}: {mutant.code!r} must occur once in {mutant.file}, but occurs 0 times."
    ]
