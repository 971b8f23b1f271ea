"""``rl4llm launch --nproc 2 --restarts 3 config.yaml``: start the ranks of a run with torchrun, and start them again.

When a rank dies, the others cannot go on without it: torchrun ends them all, and the whole run is started again from its
last checkpoint. A run that dies again and again without a new checkpoint is given up.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rl4llm.config import load_config
from rl4llm.core.checkpoint import latest_checkpoint
from rl4llm.core.errors import CheckpointError

STOPPED = 75
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where the ranks run: `nproc` on each of `nnodes` machines, of which this is number `node_rank`.

    `rendezvous` is host:port of the first machine, which all of them must reach.
    """

    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None

    def torchrun(self) -> list[str]:
        """The words that start so many processes of what follows."""
        words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.nproc}"]
        if self.nnodes == 1:
            return [*words, "--standalone"]
        place = [f"--nnodes={self.nnodes}", f"--node-rank={self.node_rank}", f"--rdzv-endpoint={self.rendezvous}"]
        return [*words, *place, "--rdzv-backend=c10d", f"--rdzv-conf=is_host={str(self.node_rank == 0).lower()}"]


class Supervisor:
    """Runs a command until it ends well, was stopped, or died `restarts` times in a row without getting any further."""

    def __init__(
        self, command: Sequence[str], progress: Callable[[], int | None], restarts: int, say: Callable[[str], None]
    ):
        self._command = list(command)
        self._progress = progress
        self._restarts = restarts
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self) -> int:
        """The exit code: 0 done, 75 stopped and resumable, else that of the last attempt."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        in_vain = 0
        while True:
            reached = self._progress()
            self._process = subprocess.Popen(self._command, start_new_session=True)
            code = self._process.wait()
            if code == 0 or self._stopped:
                return STOPPED if self._stopped else 0
            now = self._progress()
            in_vain = 0 if now != reached else in_vain + 1
            if now is None or in_vain > self._restarts or self._restarts == 0:
                self._say(f"The run ended with code {code} {_where(now)}. It is not started again.")
                return code
            self._say(f"The run ended with code {code} {_where(now)}; starting it again ({in_vain} times in vain so far).")
            time.sleep(min(2.0**in_vain, LONGEST_WAIT_S))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Pass the signal on; the ranks finish their step and save."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def launch(
    config: str, overrides: Sequence[str], *, nodes: Nodes, restarts: int, force: bool, say: Callable[[str], None]
) -> int:
    """Train on several ranks; raises ConfigError before anything starts."""
    checkpoints = Path(load_config(config, overrides).output.dir) / "checkpoints"
    train = ["-m", "rl4llm", "train", config, *overrides, *(["--force"] if force else [])]
    return Supervisor([*nodes.torchrun(), *train], lambda: _reached(checkpoints), restarts, say).run()


def _reached(checkpoints: Path) -> int | None:
    """The step of the last checkpoint that is whole; None before the first."""
    try:
        checkpoint = latest_checkpoint(checkpoints)
    except CheckpointError:  # what the ranks will say, and stop
        return None
    return checkpoint.step if checkpoint else None


def _where(step: int | None) -> str:
    return "before its first checkpoint" if step is None else f"after a checkpoint of step {step}"
