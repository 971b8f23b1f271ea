"""Breaks important lines one at a time, in a copy of the tree, and runs the tests that must notice.

    python scripts/mutate.py                                    # exit status 1 when a mutant survives
    python scripts/mutate.py --only group_deviation clip_bounds

The lines are those of scripts/mutants.py. First all of their tests must pass on an unbroken copy.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("rl4llm", "extras", "tests", "configs", "scripts", "docs", "conftest.py", "pytest.ini")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
TIMEOUT_S = 300.0  # of a mutant
OUTCOMES = {0: "SURVIVED", 1: "killed", None: "killed by the time limit"}  # by exit status of pytest


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=MUTANTS, help="run these mutants alone")
    chosen = [MUTANTS[name] for name in parser.parse_args().only or MUTANTS]
    if wrong := [problem for mutant in chosen for problem in problems(ROOT, mutant)]:
        print("\n".join([*wrong, "Next: correct scripts/mutants.py. Nothing was run."]), file=sys.stderr)
        return 1
    return judge(ROOT, chosen, timeout_s=TIMEOUT_S)


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


def judge(root: Path, mutants: Sequence[Mutant], *, timeout_s: float) -> int:
    """Test the unbroken tree, then each mutant; return the exit status."""
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    status, log = run(root, [*tests], None, 10 * timeout_s)
    if status != 0:
        print(f"{log}\nThese tests do not pass without any mutant, and none was run.")
        return 1
    print(f"{len(tests)} tests pass on the unbroken tree.", flush=True)
    outcomes: Counter[str] = Counter()
    for mutant in mutants:
        began = time.monotonic()
        status, log = run(root, mutant.tests, mutant, timeout_s)
        outcome = OUTCOMES.get(status, f"exit status {status}")
        outcomes[outcome] += 1
        print(f"{outcome:26}{mutant.name:40}{time.monotonic() - began:6.1f} s", flush=True)
        if status not in (1, None):
            print(f"{mutant.file}\n- {mutant.code}\n+ {mutant.broken}\nTests: {', '.join(mutant.tests)}")
            print("" if status == 0 else log)
    print(f"{len(mutants)} mutants:", ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    return 0 if outcomes.keys() <= {OUTCOMES[1], OUTCOMES[None]} else 1


def run(root: Path, tests: Sequence[str], mutant: Mutant | None, timeout_s: float) -> tuple[int | None, str]:
    """Run tests in a copy of the tree, broken by the mutant; return exit status, None when it was too late, and log."""
    with tempfile.TemporaryDirectory(prefix="rl4llm-mutate-") as directory:
        copy = Path(directory)
        for name in (
            COPIED
        ):  # without compiled files: Python could take one for that of a broken file of the same date
            if (root / name).is_dir():
                shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (root / name).is_file():
                shutil.copy(root / name, copy / name)
        if mutant:
            file = copy / mutant.file
            file.write_text(file.read_text().replace(mutant.code, mutant.broken))
        paths = os.pathsep.join(filter(None, (directory, os.environ.get("PYTHONPATH"))))
        environ = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", *OPTIONS, f"--basetemp={copy / 'tmp'}", *tests]
        with (copy / "log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=copy, env=os.environ | environ, stdout=log, stderr=log, start_new_session=True
            )
            try:
                status: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what the tests started too
        return status, (copy / "log").read_text(errors="replace")[-8000:]


if __name__ == "__main__":
    sys.exit(main())
