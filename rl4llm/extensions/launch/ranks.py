"""``rl4llm launch --nproc 2 --restarts 3 config.yaml``: start the ranks of a run with torchrun, and restart them.

When a rank dies, the others cannot continue: torchrun ends them all, and the whole run restarts from its last
checkpoint. A run that dies repeatedly without a new checkpoint is not restarted.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from rl4llm.config import load_config
from rl4llm.core.errors import CheckpointError, ConfigError
from rl4llm.runs.checkpoint import latest_checkpoint
from rl4llm.runtime.supervise import end_with_parent
from rl4llm.runtime.watchdog import stop_signals

STOPPED = 75
LONGEST_WAIT_S = 60.0
LINGERS_S = 60.0  # longer than the ends of ranks that end together are apart


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where the ranks run: `nproc` on each of `nnodes` machines; this is machine number `node_rank`.

    `rendezvous` is host:port of machine 0, which all machines must be able to reach. Ranks communicate over the network
    of that address, which may differ from the network of their host names. torchrun numbers the ranks in the order of
    their addresses in it.
    """

    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None

    def __post_init__(self) -> None:
        if self.nnodes > 1 and not self.rendezvous:  # each machine would train alone
            raise ConfigError("--nnodes above 1 needs --rendezvous HOST:PORT, the same on every machine.")

    def torchrun(self) -> list[str]:
        """Return the words that start this number of processes of the command that follows."""
        words = [sys.executable, "-m", "rl4llm.extensions.launch.torchrun", f"--nproc-per-node={self.nproc}"]
        if self.nnodes == 1 or self.rendezvous is None:
            return [*words, "--standalone"]
        place = [f"--nnodes={self.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.rendezvous}"]
        host = f"--rdzv-conf=is_host={str(self.node_rank == 0).lower()}"
        return [*words, *place, host, f"--local-addr={_own_address(self.rendezvous)}"]

    def environ(self) -> dict[str, str]:
        """Return the environment variables that processes need to find other machines, besides torchrun's."""
        if self.nnodes == 1 or self.rendezvous is None:
            return {}
        address = _own_address(self.rendezvous)
        interfaces = {item.address: name for name, items in psutil.net_if_addrs().items() for item in items}
        return {"GLOO_SOCKET_IFNAME": interfaces[address]} if address in interfaces else {}


class Supervisor:
    """Runs a command until it succeeds, is stopped, or has died `restarts` times in a row without progress."""

    def __init__(
        self,
        command: Sequence[str],
        progress: Callable[[], int | None],
        restarts: int,
        say: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
    ):
        self._command = list(command)
        self._environ = environ
        self._progress = progress
        self._restarts = restarts
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self) -> int:
        """Return the exit code: 0 if done, 75 if stopped and resumable, else that of the last attempt."""
        with stop_signals(self._stop):
            return self._run()

    def _run(self) -> int:
        in_vain = 0
        while True:
            reached = self._progress()
            self._process = subprocess.Popen(
                self._command, start_new_session=True, env=self._environ, preexec_fn=end_with_parent
            )
            if self._stopped:  # before there was a process to signal
                self._process.send_signal(signal.SIGTERM)
            code = self._wait(self._process)
            if code == 0 or self._stopped:
                return STOPPED if self._stopped else 0
            now = self._progress()
            in_vain = 0 if now != reached else in_vain + 1
            if now is None or in_vain > self._restarts or self._restarts == 0:
                self._say(f"The run exited with code {code} {_where(now)}. It is not restarted.")
                return code
            self._say(
                f"The run exited with code {code} {_where(now)}; restarting it "
                f"({in_vain} restarts in a row without a new checkpoint)."
            )
            if self._stopped_within(min(2.0**in_vain, LONGEST_WAIT_S)):
                return STOPPED

    def _wait(self, launched: subprocess.Popen[bytes]) -> int:
        """Return its exit code. Kill a launcher whose processes have all ended but which still waits for another
        machine.
        """
        process, had_some, alone_since = psutil.Process(launched.pid), False, time.monotonic()
        while True:
            try:
                return launched.wait(min(1.0, LINGERS_S / 4))
            except subprocess.TimeoutExpired:
                if process.children():
                    had_some, alone_since = True, time.monotonic()
                elif had_some and time.monotonic() - alone_since > LINGERS_S:
                    launched.kill()

    def _stopped_within(self, seconds: float) -> bool:
        """Wait for some seconds or until a signal arrives; return whether one did."""
        end = time.monotonic() + seconds
        while not self._stopped and time.monotonic() < end:
            time.sleep(0.1)
        return self._stopped

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Pass the signal on; the ranks finish their step and save."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def launch(
    config: str,
    overrides: Sequence[str],
    *,
    nodes: Nodes,
    restarts: int,
    force: bool,
    say: Callable[[str], None],
) -> int:
    """Train on several ranks and return the exit code. Raises ConfigError before anything starts."""
    checkpoints = Path(load_config(config, overrides).output.dir) / "checkpoints"
    train = ["-m", "rl4llm", "train", config, *overrides, *(["--force"] if force else [])]
    environ = {**nodes.environ(), **os.environ}  # what a user has set stays
    return Supervisor(
        [*nodes.torchrun(), *train], lambda: _reached(checkpoints), restarts, say, environ
    ).run()


def _own_address(rendezvous: str) -> str:
    """Return this machine's address in the network through which it reaches HOST:PORT."""
    host, _, port = rendezvous.rpartition(":")
    family, kind, _, _, peer = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(peer)  # which sends nothing
        address = probe.getsockname()[0]
    if ipaddress.ip_address(address).is_loopback and host not in (address, "localhost"):
        raise ConfigError(  # the others would wait for it
            f"--rendezvous {rendezvous} is {address} here, where others cannot reach it. Use another address of machine 0."
        )
    return address


def _reached(checkpoints: Path) -> int | None:
    """Return the step of the last intact checkpoint; None before the first."""
    try:
        checkpoint = latest_checkpoint(checkpoints)
    except CheckpointError:  # the ranks report it and stop
        return None
    return checkpoint.step if checkpoint else None


def _where(step: int | None) -> str:
    return "before its first checkpoint" if step is None else f"after a checkpoint of step {step}"
