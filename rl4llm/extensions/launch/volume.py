"""Processes that share files through a volume, where writes become visible after a commit here and a reload there.

A trainer's container runs `train`, which commits whenever a weight version, a checkpoint or the model is complete. A
server's container runs `serve`, which reloads all the time. A server that is asked to load a version before it sees it
refuses, and is asked again until it does, see `visible_within_s` of `rl4llm.extensions.servers.clients.server`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl4llm.commands.output import say
from rl4llm.runtime.supervise import start

if TYPE_CHECKING:
    from rl4llm.extensions.launch.modal_app import Disk

LOOK_S = 0.5
GRACE_S = 25.0  # a container that is shut down has 30 s


def train(
    volume: Disk, command: Sequence[str], environ: Mapping[str, str], directory: Path, named: Sequence[Path]
) -> int:
    """Run a trainer to its end in `directory` and return its exit code. However it ends, the run is saved and committed.

    The files and directories `named` are created or replaced when something of the run is complete.
    """
    directory.mkdir(parents=True, exist_ok=True)
    committed, done = _stamps(named), Done()

    def look() -> None:
        nonlocal committed
        if (now := _stamps(named)) != committed:
            committed = now if done(volume.commit) else committed

    try:
        return _run(command, environ, directory, look)
    finally:
        done(volume.commit)


def serve(volume: Disk, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a server until it ends and return its exit code.

    Its working directory is not on the volume, which could not be reloaded then.
    """
    done = Done()
    return _run(command, environ, Path("/"), lambda: done(volume.reload))


def _run(
    command: Sequence[str], environ: Mapping[str, str], directory: Path, look: Callable[[], object]
) -> int:
    process = start(command, environ, GRACE_S, directory=directory)
    try:
        while process.poll() is None:
            time.sleep(LOOK_S)
            look()
        return process.returncode
    finally:
        process.terminate()
        process.wait()


class Done:
    """Runs a step on the volume and returns whether it succeeded; prints the reason if not, unless it just did."""

    def __init__(self) -> None:
        self._reason = ""

    def __call__(self, step: Callable[[], None]) -> bool:
        before, self._reason = self._reason, ""
        try:
            step()
        except RuntimeError as error:
            self._reason = str(error)
            if self._reason != before:
                say(f"The volume is not ready, retrying: {error}")
            return False
        return True


def _stamps(named: Sequence[Path]) -> list[int | None]:
    return [_stamp(path) for path in named]


def _stamp(path: Path) -> int | None:
    """Return the time of creation; None if the path does not exist, as in the moment when a directory is replaced."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
