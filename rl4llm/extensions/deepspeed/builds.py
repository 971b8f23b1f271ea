"""Extensions that libraries compile on first use: log them, apply a deadline and remove dead locks.

torch keeps a file `lock` next to an extension while it is being compiled. It waits for the lock without a message, and
forever if the process that held it was killed.
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
STALE_S = 60.0  # a process that has just taken the lock has not started its compiler yet


def build_root() -> Path:
    """Return the directory where extensions are compiled: TORCH_EXTENSIONS_DIR, or torch's default."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def locks(root: Path) -> list[Path]:
    """Return the lock files of extensions that are being compiled, or whose compiling process died."""
    return sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])


def remove_dead_locks(root: Path, now: float | None = None) -> list[Path]:
    """Remove locks older than `STALE_S` whose extension no process on this machine is compiling; return their paths."""
    dead = [lock for lock in locks(root) if _age(lock, now) > STALE_S and not _has_builder(lock.parent)]
    for lock in dead:
        lock.unlink(missing_ok=True)
        logger.warning(
            "Removed %s: the process that compiled the extension %s was killed.", lock, lock.parent.name
        )
    return dead


@contextmanager
def watched_builds(what: str, deadline_s: float, say_every_s: float = 20.0) -> Iterator[None]:
    """Log which extensions the main thread waits for while it does `what`. Raises ConfigError at the deadline.

    Locks of processes that are killed meanwhile are removed. A process that waited for one finds no extension; the next
    start compiles it.
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
            f"{what} did not finish within {deadline_s:.0f} s. {_state(root)} Next: compile the extensions in advance, "
            "remove the lock of an extension that is not being compiled, or set TORCH_EXTENSIONS_DIR to an empty directory."
        ) from None
    finally:
        done.set()
        thread.join()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let `interrupt_main` work in a shell's background jobs, which ignore Ctrl-C."""
    ignored = (
        signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        and threading.current_thread() is threading.main_thread()
    )
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _wait_for_builders(root: Path) -> None:
    """Wait until every lock has a builder, since torch would also wait for one that was just killed."""
    while remove_dead_locks(root) or not all(_has_builder(lock.parent) for lock in locks(root)):
        time.sleep(0.2)


def _state(root: Path) -> str:
    names = [str(lock.parent) for lock in locks(root)]
    return f"Compiling: {', '.join(names)}." if names else f"No extension is being compiled in {root}."


def _age(lock: Path, now: float | None) -> float:
    """Return the seconds since a lock was taken; 0 if it was released meanwhile."""
    try:
        return (time.time() if now is None else now) - lock.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _has_builder(directory: Path) -> bool:
    """Return whether ninja or a compiler runs in the extension's directory."""
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == directory.resolve():
                return True
        except (psutil.Error, OSError):
            continue  # the process ended or belongs to another user
    return False
