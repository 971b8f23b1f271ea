"""Extensions that libraries compile when they are first used: said aloud, with a deadline, and never behind a dead lock.

torch keeps a file `lock` beside an extension while it is being compiled, and waits for it without a word, for ever where
its builder was killed.
"""

from __future__ import annotations

import _thread
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from torch.utils.cpp_extension import get_default_build_root

from rl4llm.core.errors import ConfigError

logger = logging.getLogger(__name__)
STALE_S = 60.0  # a builder that has just taken the lock does not run its compiler yet


def build_root() -> Path:
    """Where extensions are compiled: TORCH_EXTENSIONS_DIR, or torch's own choice."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def locks(root: Path) -> list[Path]:
    """Of the extensions that are being compiled, or were when their builder died."""
    return sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])


def remove_dead_locks(root: Path, now: float | None = None) -> list[Path]:
    """Remove locks that are older than `STALE_S` and whose extension no process of this machine is compiling."""
    dead = [lock for lock in locks(root) if _age(lock, now) > STALE_S and not _has_builder(lock.parent)]
    for lock in dead:
        lock.unlink(missing_ok=True)
        logger.warning("Removed %s: whoever compiled the extension %s was killed.", lock, lock.parent.name)
    return dead


@contextmanager
def watched_builds(what: str, deadline_s: float, say_every_s: float = 20.0) -> Iterator[None]:
    """While the main thread does `what`, say which extensions it waits for; raises ConfigError at the deadline.

    Locks of builders that are killed meanwhile are removed. Whoever waited then finds no extension; the next start does.
    """
    root, done, late = build_root(), threading.Event(), threading.Event()

    def watch() -> None:
        start = time.monotonic()
        while not done.wait(min(say_every_s, max(0.0, deadline_s - (time.monotonic() - start)))):
            waited = time.monotonic() - start
            remove_dead_locks(root)
            logger.warning("%s has taken %.0f s. %s", what, waited, _state(root))
            if waited >= deadline_s:
                late.set()
                _thread.interrupt_main()
                return

    thread = threading.Thread(target=watch, name="watched builds", daemon=True)
    thread.start()
    try:
        with _interruptible():
            _wait_for_builders(root)
            yield
    except KeyboardInterrupt:
        if not late.is_set():
            raise
        raise ConfigError(
            f"{what} was not done after {deadline_s:.0f} s. {_state(root)} Next: compile ahead, remove the lock of an "
            "extension that nobody compiles, or set TORCH_EXTENSIONS_DIR to an empty directory."
        ) from None
    finally:
        done.set()
        thread.join()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Processes of a shell's background jobs ignore Ctrl-C, and with it the watch's `interrupt_main`: not in here."""
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread()
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _wait_for_builders(root: Path) -> None:
    """Go on when every lock has a builder: torch would wait behind one that was killed a moment ago, too."""
    while remove_dead_locks(root) or not all(_has_builder(lock.parent) for lock in locks(root)):
        time.sleep(0.2)


def _state(root: Path) -> str:
    names = [str(lock.parent) for lock in locks(root)]
    return f"Being compiled: {', '.join(names)}." if names else f"No extension is being compiled in {root}."


def _age(lock: Path, now: float | None) -> float:
    try:
        return (time.time() if now is None else now) - lock.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _has_builder(directory: Path) -> bool:
    """ninja and the compilers run in the extension's own directory."""
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == directory.resolve():
                return True
        except (psutil.Error, OSError):
            continue  # it ended, or is another user's
    return False
