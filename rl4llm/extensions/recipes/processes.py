"""Run the processes of a recipe's stages, one after the other."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Self

from rl4llm.commands.output import STOPPED, say
from rl4llm.extensions.recipes.recipe import Recipe
from rl4llm.runtime.supervise import end_with_parent
from rl4llm.runtime.watchdog import stop_signals

GB = 1e9


class Processes:
    """Runs processes that can import a recipe's modules.

    SIGTERM is passed on to the process that runs, which saves and ends; a terminal sends it Ctrl-C and SIGHUP by itself.
    After these signals no other process starts.
    """

    def __init__(self, recipe: Recipe, stdout: Any):
        path = [str(recipe.path.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        self._stdout = stdout
        self._pid: int | None = None
        self._received: list[int] = []

    def __enter__(self) -> Self:
        self._signals = stop_signals(self._stop)
        self._signals.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._signals.__exit__(None, None, None)

    def run(self, command: Sequence[str], stage: dict[str, Any]) -> int:
        """Run a process, add its time and memory to `stage`, and return its exit code: 75 if a signal came before it."""
        if self._received:
            return STOPPED
        shown = ["rl4llm", *command[3:]] if command[1] == "-m" else ["python", *command[1:]]
        say(f"$ {shlex.join(shown)}")
        started = time.monotonic()
        process = subprocess.Popen(
            command, stdout=self._stdout, env=self._environ, preexec_fn=end_with_parent
        )
        self._pid = process.pid
        if self._received:  # before there was a process to signal
            self._pass_on()
        _, status, used = os.wait4(process.pid, 0)
        self._pid = None
        process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait again
        stage["seconds"] = stage.get("seconds", 0.0) + time.monotonic() - started
        stage["cpu_seconds"] = stage.get("cpu_seconds", 0.0) + used.ru_utime + used.ru_stime
        stage["peak_memory_gb"] = max(stage.get("peak_memory_gb", 0.0), used.ru_maxrss * 1024 / GB)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def _stop(self, number: int, _: object) -> None:
        self._received.append(number)
        if number == signal.SIGTERM:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)  # not Popen.send_signal, which would reap it during wait4
