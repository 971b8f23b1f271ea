"""Run Python programs in separate processes, forked where torch and transformers are already imported.

    done = python("-m", "rl4llm", "train", "config.yaml")        # or a script: python("examples/agent.py", "--steps", "20")
    assert done.returncode == 0, done.stdout + done.stderr

What a program does after its imports is what `subprocess.run([sys.executable, ...], capture_output=True)` would see, but the
imports, which take longer than most programs of a test, happen once for all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTED = [
    "rl4llm.api", "rl4llm.compose", "rl4llm.cli", "torch.distributed.fsdp", "torch.utils.tensorboard", "matplotlib.pyplot",
    "peft", "rl4llm.backends.torch_backend", "rl4llm.algorithms.grpo",
]  # fmt: skip
OF_DEEPSPEED = [
    "torch._inductor.compile_fx",
    "deepspeed",
]  # imported too if a chosen test trains with it, see conftest
LAST = "tests.frozen_heap"


def forks():
    """Return the context of processes, which are forked where what all of them need is already imported."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # which DeepSpeed reads when it is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, LAST])
    with contextlib.chdir(ROOT):  # where it finds `tests`
        forkserver.ensure_running()
    return context


@dataclass(frozen=True)
class Program:
    """A program that was started; `out` and `err` are the files of what it has printed so far."""

    words: list[str]
    process: multiprocessing.process.BaseProcess
    out: Path
    err: Path

    def end(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait until it ends; raises subprocess.TimeoutExpired when that does not come."""
        self.process.join(timeout)
        if self.process.is_alive():
            raise subprocess.TimeoutExpired(self.words, timeout, self.out.read_text(), self.err.read_text())
        code = self.process.exitcode
        return subprocess.CompletedProcess(self.words, code, self.out.read_text(), self.err.read_text())


@contextlib.contextmanager
def started(*words: object, cwd: Path = ROOT) -> Iterator[Program]:
    """Start a program; it is killed in the end if it still runs."""
    given = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        out.touch()
        err.touch()
        process = forks().Process(
            target=become, args=(given, str(cwd), dict(os.environ), os.devnull, str(out), str(err))
        )
        process.start()
        try:
            yield Program(given, process, out, err)
        finally:
            process.kill()
            process.join()


def python(*words: object, cwd: Path = ROOT, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; raises subprocess.TimeoutExpired when that does not come."""
    with started(*words, cwd=cwd) as program:
        return program.end(timeout)


def become(words: list[str], cwd: str, environ: dict[str, str], *files: str | int) -> None:
    """Run a program in this process; `files` are its input, its output and its errors, as paths or descriptors."""
    for descriptor, file in enumerate(files):
        os.dup2(file if isinstance(file, int) else os.open(file, os.O_RDWR | os.O_CREAT), descriptor)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put another in its place
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # TMPDIR is read again
    os.chdir(cwd)
    try:
        if words[0] == "-m":
            sys.path.insert(0, cwd)
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            isolated = words[0] == "-P"  # without the file's directory
            sys.argv = words[isolated:]
            if not isolated:
                sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process would end without
