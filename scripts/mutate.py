"""Breaks important lines one at a time, in a copy of the tree, and runs the tests that must notice.

    python scripts/mutate.py                                    # exit status 1 when a mutant survives
    python scripts/mutate.py --only group_deviation clip_bounds --jobs 4

The lines are those of scripts/mutants.py. First all of their tests must pass on the unbroken copy.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("rl4llm", "tests", "configs", "scripts", "pytest.ini")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
TIMEOUT_S = 300.0  # of a mutant
OUTCOMES = {0: "SURVIVED", 1: "killed", None: "killed by the time limit"}  # by exit status of pytest


class Tested(NamedTuple):
    """How tests ended; with any other exit status than 0 and 1 they were not run. None: their time was over."""

    mutant: Mutant | None
    tests: Sequence[str]
    status: int | None
    log: str


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=MUTANTS, help="run these mutants alone")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: 2)")
    given = parser.parse_args()
    chosen = [MUTANTS[name] for name in given.only or MUTANTS]
    if wrong := [problem for mutant in chosen for problem in problems(ROOT, mutant)]:
        print("\n".join([*wrong, "Next: correct scripts/mutants.py. Nothing was run."]), file=sys.stderr)
        return 1
    return judge(ROOT, chosen, jobs=given.jobs, timeout_s=TIMEOUT_S)


def problems(root: Path, mutant: Mutant) -> Iterator[str]:
    """Say why a mutant cannot be made or judged: files have changed since it was written."""
    text = (root / mutant.file).read_text() if (root / mutant.file).is_file() else ""
    if (found := text.count(mutant.code)) != 1:
        yield f"{mutant.name}: {mutant.code!r} must occur once in {mutant.file}, but occurs {found} times."
        return
    try:
        ast.parse(text.replace(mutant.code, mutant.broken))
    except SyntaxError as error:
        yield f"{mutant.name}: {mutant.file} does not compile with {mutant.broken!r}: {error}."
    for test in mutant.tests:
        file, _, name = test.partition("::")
        if not (root / file).is_file() or name.partition("[")[0] not in functions(root / file):
            yield f"{mutant.name}: {test} does not exist."


@cache
def functions(file: Path) -> set[str]:
    """Return the names of the functions at the top of a file."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def judge(root: Path, mutants: Sequence[Mutant], *, jobs: int, timeout_s: float) -> int:
    """Test the unbroken tree, then each mutant; return the exit status."""
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(test for mutant in mutants for test in mutant.tests):
        files.setdefault(test.partition("::")[0], []).append(test)
    with tempfile.TemporaryDirectory(prefix="rl4llm-mutate-") as directory, ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            copies.put(copied(root, Path(directory, str(number))))
        for done in pool.map(lambda tests: run(copies, tests, None, 10 * timeout_s), files.values()):
            if done.status != 0:
                pool.shutdown(cancel_futures=True)
                print(
                    f"{done.log}\nNot passed without any mutant: {', '.join(done.tests)}. No mutant was run."
                )
                return 1
        print(f"The tests of {len(files)} files pass on the unbroken tree.", flush=True)
        judged = list(pool.map(lambda mutant: run(copies, mutant.tests, mutant, timeout_s), mutants))
    return report(root, judged)


def copied(root: Path, copy: Path) -> Path:
    """Copy what the tests need, without compiled files: Python could take one for that of a broken file of the same date."""
    copy.mkdir()
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (root / name).is_file():
            shutil.copy(root / name, copy / name)
    return copy


def run(copies: queue.Queue[Path], tests: Sequence[str], mutant: Mutant | None, timeout_s: float) -> Tested:
    """Run tests in a free copy, broken by the mutant, against the library of that copy."""
    copy, began = copies.get(), time.monotonic()
    file = copy / (mutant.file if mutant else "pytest.ini")
    whole = file.read_text() if mutant else ""
    if mutant:
        file.write_text(whole.replace(mutant.code, mutant.broken))
    environ = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *OPTIONS, f"--basetemp={copy / 'tmp'}", *tests]
    with (copy / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=copy, env=os.environ | environ, stdout=log, stderr=log, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        status = process.returncode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the tests started too
        process.wait()
    if mutant:
        file.write_text(whole)
        outcome = OUTCOMES.get(status, f"exit status {status}")
        print(f"{outcome:26}{mutant.name:40}{time.monotonic() - began:6.1f} s", flush=True)
    tested = Tested(mutant, tests, status, (copy / "log").read_text(errors="replace")[-8000:])
    copies.put(copy)
    return tested


def report(root: Path, judged: Sequence[Tested]) -> int:
    """Print what survived, and return the exit status."""
    for mutant, tests, status, log in judged:
        if mutant and status not in (1, None):
            how = "survived" if status == 0 else f"exit status {status}"
            print(f"\n{mutant.name}: {how} with\n{diff(root, mutant)}\nTests: {', '.join(tests)}")
            print("" if status == 0 else log)
    killed, late, survived = (sum(one.status == status for one in judged) for status in (1, None, 0))
    others = len(judged) - killed - late - survived
    print(
        f"\n{len(judged)} mutants: {killed} killed by a test, {late} by the time limit, {survived} survived, "
        f"{others} not judged."
    )
    return 0 if survived == others == 0 else 1


def diff(root: Path, mutant: Mutant) -> str:
    """Show what was broken."""
    text = (root / mutant.file).read_text()
    lines = (version.splitlines() for version in (text, text.replace(mutant.code, mutant.broken)))
    return "\n".join(difflib.unified_diff(*lines, mutant.file, mutant.file, n=1, lineterm=""))


if __name__ == "__main__":
    sys.exit(main())
