"""Processes that share files through a volume, whose writes others see only once they are committed here and reloaded there.

A trainer's container runs `train`, which commits whenever a version of the weights, a checkpoint or the model got its name;
a server's runs `serve`, which reloads all the time. A server that is told of a version before it sees it refuses, and is
told again until it does, see `visible_within_s` of `rl4llm.inference.server`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rl4llm.core.supervise import SUPERVISE

LOOK_S = 0.5
GRACE_S = 25.0  # a container that is taken away has 30 s


class Volume(Protocol):
    """A directory of several containers."""

    def commit(self) -> None:
        """Let others see what was written here; RuntimeError for what may be done again later."""

    def reload(self) -> None:
        """See what others committed; RuntimeError while a file of it is open here."""


def train(volume: Volume, command: Sequence[str], environ: Mapping[str, str], directory: Path, named: Sequence[Path]) -> int:
    """Run a trainer to its end, in `directory`; its exit code. However this ends, the run has saved and is committed.

    Args:
        named: files and directories that are new or replaced when something of the run is whole.
    """
    process = _start(command, environ, directory)
    committed = _stamps(named)
    say = Once()
    try:
        while process.poll() is None:
            time.sleep(LOOK_S)
            if (now := _stamps(named)) != committed:
                committed = now if _done(volume.commit, say) else committed
        return process.returncode
    finally:
        process.terminate()
        process.wait()
        _done(volume.commit, say)


def serve(volume: Volume, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a server until it ends; its exit code. Its directory is not on the volume, which could not be reloaded then."""
    process = _start(command, environ, Path("/"))
    say = Once()
    try:
        while process.poll() is None:
            time.sleep(LOOK_S)
            _done(volume.reload, say)
        return process.returncode
    finally:
        process.terminate()
        process.wait()


class Once:
    """Says a line, but not again what it said last."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, line: str) -> None:
        if line not in ("", self._last):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        self._last = line


def _done(step: Callable[[], None], say: Once) -> bool:
    """Whether a step with the volume was taken; why not is said."""
    try:
        step()
    except RuntimeError as error:
        say(f"The volume is not ready, and is asked again: {error}")
        return False
    say("")
    return True


def _stamps(named: Sequence[Path]) -> list[int | None]:
    return [_stamp(path) for path in named]


def _stamp(path: Path) -> int | None:
    """When it was made; None where it is not there, as in the moment in which a directory is replaced."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _start(command: Sequence[str], environ: Mapping[str, str], directory: Path) -> subprocess.Popen[bytes]:
    """A process that ends with this one; signals to this one are passed on by us alone."""
    supervisor = [sys.executable, "-P", str(SUPERVISE), str(os.getpid()), str(GRACE_S)]
    directory.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [*supervisor, *command],
        env={**os.environ, **environ},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
