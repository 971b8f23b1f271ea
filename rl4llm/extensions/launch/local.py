"""This machine: all processes of a run are children of this one, and none of them outlives it.

A run gets all GPUs, or those that CUDA_VISIBLE_DEVICES leaves visible.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch.ranks import STOPPED
from rl4llm.extensions.launch.roles import NUMBER, Role, hosts_variable, log_of, roles
from rl4llm.runs.run_dir import RunDir
from rl4llm.runtime import devices
from rl4llm.runtime.gpus import VISIBLE, visible_gpus
from rl4llm.runtime.ports import free_port
from rl4llm.runtime.supervise import last_words, start
from rl4llm.runtime.watchdog import stop_signals

HOST = "127.0.0.1"
LOOK_S = 0.2
GRACE_S = 120.0  # to finish the current step and save a checkpoint


@dataclass(frozen=True, slots=True)
class Assignment:
    """One process of a role: its number, and the GPUs that it may use, by number or by name."""

    role: Role
    number: int
    devices: tuple[int | str, ...] = ()

    def __str__(self) -> str:
        return f"{self.role.name} {self.number}"

    def environ(self) -> dict[str, str]:
        """Return the variables that distinguish it from other processes; if its role has no GPUs, none is hidden."""
        devices = {VISIBLE: ",".join(map(str, self.devices))} if self.role.gpus else {}
        return {NUMBER: str(self.number), **devices}


def launch_here(
    config: str,
    overrides: Sequence[str],
    *,
    say: Callable[[str], None],
    force: bool = False,
    python: Sequence[str] = (sys.executable, "-m", "rl4llm"),
) -> int:
    """Start all roles of a configuration, wait for the trainer, stop the others; return the trainer's exit code.

    The output of the others is in `output.dir/logs`. Raises ConfigError and RunDirError before anything starts.
    """
    (train, *others), shared = planned(
        config, overrides, force=force, python=python, gpus=present(os.environ)
    )
    run_dir = RunDir(load_config(config, overrides).output.dir)
    run_dir.make_logs()
    logs = {process: log_of(run_dir, process.role.name, process.number) for process in others}
    with ExitStack() as started:
        processes = {}
        for process in (*reversed(others), train):  # the trainer starts last and is stopped first
            with open(logs[process], "ab") if process in logs else nullcontext() as log:
                environ = {**shared, **process.environ()}
                processes[process] = start(process.role.command, environ, GRACE_S, log=log)
            started.callback(_stop, processes[process])
            if process in logs:
                say(f"Starting {process}; its log is {logs[process]}")
        code = _wait(processes.pop(train), processes, logs, say)
    if code == STOPPED:
        say("Stopped. The same command with --on local resumes the run.")
    return code


def planned(
    config: str,
    overrides: Sequence[str],
    *,
    force: bool = False,
    python: Sequence[str] = (sys.executable, "-m", "rl4llm"),
    gpus: Sequence[str] | None = None,
) -> tuple[list[Assignment], dict[str, str]]:
    """Return the processes, trainer first, and the variables that all get: the address of each, on free ports.

    GPUs are assigned in order: first to the training processes, then to each server. With inference.cohost servers begin at
    the trainer's first GPU.

    Args:
        gpus: names of the GPUs to assign; None for any number of them, named from 0. Raises ConfigError for too few.
    """
    chosen = load_config(config, overrides)
    command = (*python, "launch", config, *overrides, *(["--force"] if force else []))
    trainer, *others = roles(chosen, command, here=True)
    if gpus is not None and not gpus and chosen.model.device == "auto":
        trainer = replace(trainer, gpus=0)  # it uses the CPU
    processes = assigned([trainer, *others])
    if gpus is not None:
        count = max((int(device) + 1 for process in processes for device in process.devices), default=0)
        if count > len(gpus):
            raise ConfigError(
                f"The run needs {count} GPUs, but this machine has {len(gpus)} visible. Lower launch.nproc and "
                "launch.servers, or run without GPUs (model.device=cpu launch.server_gpus=0)."
            )
        processes = [
            replace(process, devices=tuple(gpus[int(device)] for device in process.devices))
            for process in processes
        ]
    # free ports, so that the trainer of another run on this machine cannot find our servers
    hosts = {role.name: [f"{HOST}:{free_port(HOST)}" for _ in range(role.count)] for role in others}
    hosts["trainer"] = [HOST] * trainer.count
    return processes, {hosts_variable(name): ",".join(addresses) for name, addresses in hosts.items()}


def assigned(roles: Sequence[Role]) -> list[Assignment]:
    """Assign GPUs to the processes of all roles. Roles that share the trainer's GPUs begin at its first one."""
    processes, device = [], 0
    for role in roles:
        device = 0 if role.shares_gpus else device
        for number in range(role.count):
            processes.append(Assignment(role, number, tuple(range(device, device + role.gpus))))
            device += role.gpus
    return processes


def present(environ: Mapping[str, str]) -> list[str]:
    """Return the visible GPUs of this machine, as CUDA_VISIBLE_DEVICES names them for a process that gets some of them."""
    count, names = len(devices.names()), visible_gpus(environ)
    return [str(number) for number in range(count)] if names is None else names[:count]


def _wait(
    trainer: subprocess.Popen[bytes],
    others: Mapping[Assignment, subprocess.Popen[bytes]],
    logs: Mapping[Assignment, Path],
    say: Callable[[str], None],
) -> int:
    """Return the exit code of the trainer, or of another process that ended first, which stops the trainer.

    Signals go only to the trainer, which saves; a second one ends it at once.
    """
    died: dict[Assignment, int] = {}
    signals = 0

    def stop(number: int, _: object) -> None:
        nonlocal signals
        signals += not signals or number != signal.SIGHUP  # a terminal that closes sends it more than once
        if signals > 1:
            trainer.send_signal(signal.SIGINT)

    with stop_signals(stop):
        while trainer.poll() is None and not signals and not died:
            time.sleep(LOOK_S)
            for assignment, process in others.items():
                if process.poll() is not None:
                    died[assignment] = process.returncode or 1
                    say(f"{assignment} exited with code {process.returncode}; stopping the run.")
        trainer.terminate()
        code = trainer.wait()
        for assignment in died:  # after the trainer's last output
            say(f"{assignment} ended first. {last_words(logs[assignment])}")
        return next(iter(died.values())) if died and code else code


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and wait for it; its supervisor ends all of its children."""
    process.terminate()
    process.wait()
