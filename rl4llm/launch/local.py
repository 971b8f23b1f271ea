"""This machine: every process of a run is a child of this one, and none is left when it ends, however that comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

from rl4llm.config import load_config
from rl4llm.core.run_dir import RunDir
from rl4llm.core.supervise import SUPERVISE
from rl4llm.inference.ports import free_port
from rl4llm.launch.job import Place, places
from rl4llm.launch.ranks import STOPPED
from rl4llm.launch.roles import NUMBER, Role, hosts_variable, log_of, roles

HOST = "127.0.0.1"
LAST_LINES, LONGEST_LINE, TAIL_BYTES = 40, 400, 65536  # of the log of a process that ended, in the message
LOOK_S = 0.2
GRACE_S = 120.0  # for the step that runs, and a checkpoint


def launch_here(
    config: str,
    overrides: Sequence[str],
    *,
    say: Callable[[str], None],
    force: bool = False,
    python: Sequence[str] = (sys.executable, "-m", "rl4llm"),
) -> int:
    """Start all roles of a configuration, wait for the trainer, stop the others; the trainer's exit code.

    What the others say is in `output.dir/logs`. Raises ConfigError and RunDirError before anything starts.
    """
    chosen = load_config(config, overrides)
    found, shared = planned(config, overrides, force=force, python=python)
    RunDir(chosen.output.dir).make_logs()
    with ExitStack() as started:
        processes = {}
        for place in reversed(found):  # the trainer last, and ended first
            log = log_of(chosen, place.role.name, place.number) if place is not found[0] else None
            processes[place] = _start(place, shared, log)
            started.callback(_stop, processes[place])
            if log:
                say(f"{_name(place)} starts; its log is {log}")
        trainer = processes.pop(found[0])
        code = _wait(trainer, processes, lambda place: _last_words(log_of(chosen, place.role.name, place.number)), say)
    if code == STOPPED:
        say("Stopped; the same command with --on local goes on with the run.")
    return code


def planned(
    config: str, overrides: Sequence[str], *, force: bool = False, python: Sequence[str] = (sys.executable, "-m", "rl4llm")
) -> tuple[list[Place], dict[str, str]]:
    """The processes, trainer first, and what all of them are told: where each is, on ports that nobody has.

    GPUs are given out by number: first those of the processes that train, then each server's own.
    """
    command = (*python, "launch", config, *overrides, *(["--force"] if force else []))
    wanted = roles(load_config(config, overrides), command, here=True)
    (found,) = places([{role.name: role.count for role in wanted}], wanted)
    return found, {hosts_variable(role.name): ",".join(_hosts(role)) for role in wanted}


def _hosts(role: Role) -> list[str]:
    """Another run on this machine has other ports: its trainer must not find our servers."""
    if role.name == "trainer":
        return [HOST] * role.count
    return [f"{HOST}:{free_port(HOST)}" for _ in range(role.count)]


def _last_words(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = [line[:LONGEST_LINE] for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return "\n".join([f"The last lines of {log}:", *lines[-LAST_LINES:]]) if lines else f"{log} is empty."


def _start(place: Place, shared: Mapping[str, str], log: Path | None) -> subprocess.Popen[bytes]:
    """A process in a session of its own, so that Ctrl-C is ours to pass on; it ends when this process does."""
    supervisor = [sys.executable, "-P", str(SUPERVISE), str(os.getpid()), str(GRACE_S)]
    environ = {**os.environ, **shared, **own(place)}
    with open(log, "ab") if log else nullcontext() as file:
        return subprocess.Popen(
            [*supervisor, *place.role.command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _name(place: Place) -> str:
    return f"{place.role.name} {place.number}"


def own(place: Place) -> dict[str, str]:
    """What one process is told; where the configuration asks for no GPU, none is hidden from anybody."""
    return {name: value for name, value in place.environ().items() if place.role.gpus or name == NUMBER}


def _wait(
    trainer: subprocess.Popen[bytes],
    others: Mapping[Place, subprocess.Popen[bytes]],
    last_words: Callable[[Place], str],
    say: Callable[[str], None],
) -> int:
    """The trainer's exit code, or that of one of the others that ended, which stops the trainer.

    Signals are for the trainer alone, until it has saved; a second one ends it at once.
    """
    died: dict[Place, int] = {}
    asked = 0

    def ask(*_: object) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            trainer.send_signal(signal.SIGINT)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while trainer.poll() is None and not asked and not died:
            time.sleep(LOOK_S)
            for place, process in others.items():
                if process.poll() is not None:
                    died[place] = process.returncode or 1
                    say(f"{_name(place)} ended with code {process.returncode}; the run is stopped.")
        trainer.terminate()
        code = trainer.wait()
        for place in died:  # below what the trainer said about its end
            say(f"{_name(place)} ended first. {last_words(place)}")
        return next(iter(died.values())) if died and code else code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and wait for it; its supervisor leaves nothing of it behind."""
    process.terminate()
    process.wait()
