"""A temporary directory for a command that runs a model and keeps no files."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rl4llm.compose import server_urls
from rl4llm.config import Config
from rl4llm.core.errors import RunDirError


@contextmanager
def scratch_of(config: Config) -> Iterator[Config]:
    """Yield the configuration with a temporary output directory, which servers can read if the run has any.

    The directory is removed at the end, and after SIGTERM. Raise RunDirError if it cannot be made.
    """
    shared = existing(Path(config.sync.dir or config.output.dir)) if server_urls(config) else None
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".scratch-", dir=shared)
    except OSError as error:
        raise RunDirError(
            f"Cannot make a directory in {shared or tempfile.gettempdir()}: {error.strerror}."
        ) from error
    with _sigterm_as_ctrl_c(), scratch as directory:
        yield replace(
            config, output=replace(config.output, dir=directory), sync=replace(config.sync, dir=None)
        )


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, which ends the command through every `with` block."""
    if threading.current_thread() is not threading.main_thread():  # other threads cannot handle signals
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        ctrl_c = signal.getsignal(signal.SIGINT)  # an event loop replaces it while it runs
        if not callable(ctrl_c):
            raise KeyboardInterrupt
        ctrl_c(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def existing(directory: Path) -> Path:
    """Return the directory or, if it does not exist, its nearest existing parent."""
    return next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
