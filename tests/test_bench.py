"""The scripts start, those of `scripts/bench` too; what they measure needs time, other programs or a GPU."""

import sys
from pathlib import Path

import pytest
from forked_python import python

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
SCRIPTS = [path for path in sorted(BENCH.parent.rglob("*.py")) if "parse_args()" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_prints_its_help(script):
    done = python(script, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script.name}")


def test_sides_take_turns_and_the_first_rounds_do_not_count(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    from peer import in_turns, ratios, spread

    calls = []
    sides = {"a": lambda: calls.append("a") or len(calls), "b": lambda: calls.append("b") or len(calls)}
    assert in_turns(sides, 2, warm_up=1) == {"a": [3, 5], "b": [4, 6]} and calls == [*"ababab"]
    assert spread(ratios([3, 8], [1, 2]), ".1f") == "3.5 (3.0 to 4.0)"
