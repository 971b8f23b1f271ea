"""This machine: every process of a run is a child of this one, and none is left when it ends, however that comes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from rl4llm.config import load_config
from rl4llm.core.supervise import SUPERVISE
from rl4llm.launch.job import Place, places
from rl4llm.launch.roles import NUMBER, hosts_variable, roles

LOOK_S = 0.2
GRACE_S = 120.0  # for the step that runs, and a checkpoint


def launch_here(
    config: str, overrides: Sequence[str], *, dry_run: bool, say: Callable[[str], None], python: str = sys.executable
) -> int:
    """Start all roles of a configuration, wait for the trainer, stop the others; the trainer's exit code.

    GPUs are given out by number: first those of the processes that train, then each server's own.
    """
    wanted = roles(load_config(config, overrides), (python, "-m", "rl4llm", "launch", config, *overrides), here=True)
    (found,) = places([{role.name: role.count for role in wanted}], wanted)
    shared = {hosts_variable(role.name): ",".join(["127.0.0.1"] * role.count) for role in wanted}
    if dry_run:
        for place in found:
            say(_shown(place, shared))
        return 0
    with ExitStack() as started:
        processes = {}
        for place in reversed(found):  # the trainer last, and ended first
            processes[place] = _start(place, shared)
            started.callback(_stop, processes[place])
        trainer = processes.pop(found[0])
        return _wait(trainer, processes, say)


def _start(place: Place, shared: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process in a session of its own, so that Ctrl-C is ours to pass on; it ends when this process does."""
    supervisor = [sys.executable, "-P", str(SUPERVISE), str(os.getpid()), str(GRACE_S)]
    environ = {**os.environ, **shared, **_own(place)}
    return subprocess.Popen(
        [*supervisor, *place.role.command], env=environ, stdin=subprocess.DEVNULL, start_new_session=True
    )


def _own(place: Place) -> dict[str, str]:
    """What one process gets; where the configuration asks for no GPU, none is hidden from anybody."""
    return {name: value for name, value in place.environ().items() if place.role.gpus or name == NUMBER}


def _shown(place: Place, shared: Mapping[str, str]) -> str:
    given = [f"{name}={value}" for name, value in {**shared, **_own(place)}.items()]
    return shlex.join(["env", *given, *place.role.command])


def _wait(
    trainer: subprocess.Popen[bytes], others: Mapping[Place, subprocess.Popen[bytes]], say: Callable[[str], None]
) -> int:
    """The trainer's exit code. Signals are for it alone, until it has saved; it is stopped when one of the others ends."""
    stopped = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while trainer.poll() is None and not stopped.wait(LOOK_S):
            for place, process in others.items():
                if process.poll() is not None:
                    say(f"{place.role.name} {place.number} ended with code {process.returncode}; the run is stopped.")
                    stopped.set()
        trainer.terminate()
        return trainer.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and wait for it; its supervisor leaves nothing of it behind."""
    process.terminate()
    process.wait()
