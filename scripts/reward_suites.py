"""Runs the proof of the sandbox and of the graders and prints the counts: nothing in it is typed in.

    python scripts/reward_suites.py [--humaneval HumanEval.jsonl.gz] [--math MATH_TRAIN.jsonl.gz]

Programs that attack or cheat must be contained, graded as wrong, and leave nothing behind. Honest programs
and their wrong twins must be graded correctly; and, where its file is given, HumanEval's own solutions
and as many stubs. The first two run as this user and, where this is root, as an ordinary user too. Then mathematics, by
scripts/bench/grading.py. Exits with 1 if one fails. The tests in tests/extensions/sandbox and tests/rewards run the same
programs.
"""

from __future__ import annotations

import argparse
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "extensions" / "sandbox")]

from abuse import ATTACKS  # noqa: E402
from honest import HONEST  # noqa: E402
from sandbox_user import as_nobody, attacks, honest  # noqa: E402

from rl4llm.data.read import read_rows  # noqa: E402
from rl4llm.extensions.sandbox import Limits, Sandbox  # noqa: E402
from rl4llm.extensions.sandbox.code_tests import program_of, stored_tests  # noqa: E402

Count = tuple[str, str, int, dict[str, str]]
"""Suite, user, number of programs, and what failed by name."""


def main() -> int:
    """Run everything and print a table; 1 when anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--humaneval", default=os.environ.get("RL4LLM_HUMANEVAL"), help="file with HumanEval's problems"
    )
    parser.add_argument("--math", help="file with MATH's training problems")
    arguments = parser.parse_args()
    console = Console(highlight=False, markup=False)
    sandbox = Sandbox(limits=Limits(wall_s=20, total_s=60))
    console.print(str(sandbox.probe()), soft_wrap=True)
    table = Table("suite", "user", "programs", "as it must be", "seconds")
    failed = {}
    for suite, user, number, problems, seconds in _timed(_counts(sandbox, arguments.humaneval)):
        table.add_row(suite, user, str(number), str(number - len(problems)), f"{seconds:.1f}")
        failed |= {f"{suite}, {user}: {name}": problem for name, problem in problems.items()}
    sandbox.close()
    console.print(table)
    for name, problem in failed.items():
        console.print(f"{name}: {problem}", soft_wrap=True)
    if not arguments.humaneval:
        console.print("HumanEval was left out: --humaneval or RL4LLM_HUMANEVAL names its file.")
    console.print("Mathematics")
    given = ["--math", arguments.math] if arguments.math else []
    graded = subprocess.run([sys.executable, ROOT / "scripts" / "bench" / "grading.py", *given], check=False)
    return 1 if failed or graded.returncode else 0


def _counts(sandbox: Sandbox, humaneval: str | None) -> Iterator[Count]:
    own = pwd.getpwuid(os.getuid()).pw_name
    yield "attacks and abuse", own, len(ATTACKS), _uncontained(attacks((), "auto"))
    yield "honest programs and wrong twins", own, len(HONEST), _misjudged(honest((), "auto"))
    if os.getuid() == 0:
        yield "attacks and abuse", "nobody", len(ATTACKS), _uncontained(as_nobody("attacks"))
        yield "honest programs and wrong twins", "nobody", len(HONEST), _misjudged(as_nobody("honest"))
    if humaneval:
        rows = [row for _, row in read_rows(humaneval, "test")]
        solutions = {row["task_id"]: row["canonical_solution"] for row in rows}
        yield "HumanEval, its own solutions", own, len(rows), _graded(sandbox, rows, solutions, "ok")
        yield (
            "HumanEval, stubs",
            own,
            len(rows),
            _graded(sandbox, rows, dict.fromkeys(solutions, "    pass\n"), "wrong"),
        )


def _uncontained(results: dict[str, list[str]]) -> dict[str, str]:
    return {name: "; ".join(problems) for name, problems in results.items() if problems}


def _misjudged(statuses: dict[str, str]) -> dict[str, str]:
    expected = {item.name: item.status for item in HONEST}
    return {
        name: f"{status}, not {expected[name]}"
        for name, status in statuses.items()
        if status != expected[name]
    }


def _graded(sandbox: Sandbox, rows: list, solutions: dict[str, str], status: str) -> dict[str, str]:
    programs = [program_of(solutions[row["task_id"]], stored_tests(row["test"], row), row) for row in rows]
    with ThreadPoolExecutor(sandbox.slots) as threads:
        outcomes = threads.map(sandbox.run, programs)
    graded = zip(rows, outcomes, strict=True)
    return {
        row["task_id"]: f"{outcome.status}: {outcome.reason}"
        for row, outcome in graded
        if outcome.status != status
    }


def _timed(counts: Iterator[Count]) -> Iterator[tuple[str, str, int, dict[str, str], float]]:
    started = time.monotonic()
    for count in counts:
        yield *count, time.monotonic() - started
        started = time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
