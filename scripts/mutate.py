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
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("rl4llm", "tests", "configs", "scripts", "pytest.ini")
WARM = (  # what the tests import beside the library; forked processes have it already
    "torch", "torch.distributed.tensor", "torch.utils.tensorboard", "transformers", "transformers.models.qwen2",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.modeling_auto", "safetensors.torch", "aiohttp", "yaml", "xxhash",
)  # fmt: skip
OUTCOMES = {0: "passed", 1: "failed"}  # of pytest; with any other the tests were not run
SHOWN = {"passed": "SURVIVED", "failed": "killed", "timed out": "killed by the time limit"}


@dataclass(slots=True)
class Task:
    """Tests that run in one of the copies, which is broken for as long as they run."""

    name: str
    tests: Sequence[str]
    mutant: Mutant | None = None
    outcome: str = ""
    seconds: float = 0.0
    log: str = ""


@dataclass(slots=True)
class Slot:
    """A copy of the tree and the process that tests it since `began`; `whole` is the file before it was broken."""

    copy: Path
    task: Task
    pid: int = 0
    began: float = 0.0
    whole: str = ""


def main() -> int:
    given = arguments()
    chosen = [MUTANTS[name] for name in given.only] if given.only else list(MUTANTS.values())
    wrong = [problem for mutant in chosen for problem in problems(ROOT, mutant)]
    if wrong:
        print("\n".join([*wrong, "Next: correct scripts/mutants.py. Nothing was run."]), file=sys.stderr)
        return 1
    for name in WARM:
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tests under way end too
    return judge(ROOT, chosen, jobs=given.jobs, timeout_s=given.timeout)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=MUTANTS, help="run these mutants alone")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="per mutant (default: 300)"
    )
    return parser.parse_args()


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
    if "rl4llm" in sys.modules:
        raise RuntimeError("rl4llm is imported already, so the tests would not see a mutant.")
    with tempfile.TemporaryDirectory(prefix="rl4llm-mutate-") as directory:
        copies = [copied(root, Path(directory, str(number))) for number in range(jobs)]
        files: dict[str, list[str]] = {}
        for test in dict.fromkeys(test for mutant in mutants for test in mutant.tests):
            files.setdefault(test.partition("::")[0], []).append(test)
        began = time.monotonic()
        for task in run([Task("unbroken", tests) for tests in files.values()], copies, 10 * timeout_s):
            if task.outcome != "passed":
                print(
                    f"{task.log}\nWithout any mutant: {task.outcome}: {', '.join(task.tests)}. No mutant was run."
                )
                return 1
        print(
            f"The tests of {len(files)} files pass on the unbroken tree ({time.monotonic() - began:.0f} s).",
            flush=True,
        )
        tasks = list(run([Task(mutant.name, mutant.tests, mutant) for mutant in mutants], copies, timeout_s))
    return report(root, tasks, time.monotonic() - began)


def copied(root: Path, copy: Path) -> Path:
    """Copy what the tests need, without compiled files: Python could take one for that of a broken file of the same date."""
    copy.mkdir()
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (root / name).is_file():
            shutil.copy(root / name, copy / name)
    return copy


def run(tasks: Iterable[Task], copies: Sequence[Path], timeout_s: float) -> Iterator[Task]:
    """Run the tasks, one in each copy at a time; yield each when it is done."""
    waiting, free, busy = deque(tasks), list(copies), list[Slot]()
    try:
        while waiting or busy:
            while waiting and free:
                busy.append(start(Slot(free.pop(), waiting.popleft())))
            for slot in [slot for slot in busy if ended(slot) or time.monotonic() > slot.began + timeout_s]:
                busy.remove(slot)
                yield finish(slot)
                free.append(slot.copy)
            time.sleep(0.05)
    finally:
        for slot in busy:
            end(slot)


def start(slot: Slot) -> Slot:
    """Break the copy, and fork the process that tests it."""
    if mutant := slot.task.mutant:
        file = slot.copy / mutant.file
        slot.whole = file.read_text()
        file.write_text(slot.whole.replace(mutant.code, mutant.broken))
    sys.stdout.flush()
    slot.began, slot.pid = time.monotonic(), os.fork()
    if slot.pid == 0:
        status = 70
        try:
            status = run_tests(slot.copy, slot.task.tests)
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
    return slot


def ended(slot: Slot) -> bool:
    """Say whether the process is over. Its number stays taken until `end`, so a signal cannot reach another process."""
    return os.waitid(os.P_PID, slot.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end(slot: Slot) -> int:
    """End what is left of the process and its children, which form a group; return its exit status."""
    os.kill(slot.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it has not formed one yet
        os.killpg(slot.pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(slot.pid, 0)[1])


def finish(slot: Slot) -> Task:
    """Note how the tests ended, and mend the copy."""
    task, in_time = slot.task, ended(slot)
    status = end(slot)
    task.seconds = time.monotonic() - slot.began
    task.outcome = OUTCOMES.get(status, f"exit status {status}") if in_time else "timed out"
    task.log = (slot.copy / "log").read_text(errors="replace")[-8000:]
    if task.mutant is not None:
        (slot.copy / task.mutant.file).write_text(slot.whole)
        print(f"{SHOWN.get(task.outcome, task.outcome):26}{task.name:40}{task.seconds:6.1f} s", flush=True)
    return task


def run_tests(copy: Path, tests: Sequence[str]) -> int:
    """In the forked process: run the tests of a copy against the library of that copy."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(copy / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    library = importlib.import_module("rl4llm").__file__
    if not Path(library or "").is_relative_to(copy):
        raise RuntimeError(f"rl4llm was imported from {library}, not from the copy.")
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={copy / 'tmp'}"]
    return int(pytest.main([*options, *tests]))


def report(root: Path, tasks: Sequence[Task], seconds: float) -> int:
    """Print what survived, and return the exit status."""
    counts = {name: sum(task.outcome == name for task in tasks) for name in ("failed", "timed out", "passed")}
    for task in tasks:
        if task.mutant is not None and task.outcome not in ("failed", "timed out"):
            print(
                f"\n{task.name}: {task.outcome} with\n{diff(root, task.mutant)}\nTests: {', '.join(task.tests)}"
            )
            print("" if task.outcome == "passed" else task.log)
    others = len(tasks) - sum(counts.values())
    print(
        f"\n{len(tasks)} mutants in {seconds:.0f} s: {counts['failed']} killed by a test, {counts['timed out']} by the time "
        f"limit, {counts['passed']} survived, {others} not judged."
    )
    return 0 if counts["passed"] == others == 0 else 1


def diff(root: Path, mutant: Mutant) -> str:
    """Show what was broken."""
    text = (root / mutant.file).read_text()
    lines = (version.splitlines() for version in (text, text.replace(mutant.code, mutant.broken)))
    return "\n".join(difflib.unified_diff(*lines, mutant.file, mutant.file, n=1, lineterm=""))


if __name__ == "__main__":
    sys.exit(main())
