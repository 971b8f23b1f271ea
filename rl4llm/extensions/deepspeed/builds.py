"""Extensions that libraries compile on first use: log them, apply a deadline and remove dead locks.

torch keeps a file `lock` next to an extension while it is being compiled. It waits for the lock without a message, and
forever if the process that held it was killed.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from torch.utils.cpp_extension import get_default_build_root

from rl4llm.core.errors import ConfigError

logger = logging.getLogger(__name__)
STALE_S = 60.0  # a process that has just taken the lock has not started its compiler yet


def locks(root: Path) -> list[Path]:
    """Return the lock files of extensions that are being compiled, or whose compiling process died."""
    return sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])


def remove_dead_locks(root: Path) -> list[Path]:
    """Remove locks older than `STALE_S` whose extension no process on this machine is compiling; return their paths."""
    dead = []
    for lock in locks(root):
        with contextlib.suppress(FileNotFoundError):  # it was released meanwhile
            if time.time() - lock.stat().st_mtime > STALE_S and not _has_builder(lock.parent):
                lock.unlink()
                dead.append(lock)
                logger.warning("Removed %s: the process that compiled this extension was killed.", lock)
    return dead


@contextlib.contextmanager
def watched_builds(what: str, deadline_s: float, say_every_s: float = 20.0) -> Iterator[None]:
    """Log which extensions the main thread waits for while it does `what`. Raises ConfigError at the deadline.

    Locks of processes that are killed meanwhile are removed. A process that waited for one finds no extension; the next
    start compiles it.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    done, late, start = threading.Event(), threading.Event(), time.monotonic()

    def watch() -> None:
        while not done.wait(say_every_s):
            remove_dead_locks(root)
            logger.warning("%s has taken %.0f s. %s", what, time.monotonic() - start, _state(root))
            if time.monotonic() - start >= deadline_s:
                late.set()
                _thread.interrupt_main()
                return

    thread = threading.Thread(target=watch, name="watched builds", daemon=True)
    thread.start()
    try:
        with _interruptible():
            # torch would also wait for a lock whose builder was just killed
            while remove_dead_locks(root) or not all(_has_builder(lock.parent) for lock in locks(root)):
                time.sleep(0.2)
            yield
    except KeyboardInterrupt:
        if not late.is_set():
            raise
        raise ConfigError(
            f"{what} did not finish within {deadline_s:.0f} s. {_state(root)} Set TORCH_EXTENSIONS_DIR to a new directory."
        ) from None
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let `interrupt_main` work in a shell's background jobs, which ignore Ctrl-C."""
    in_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as after:
        if in_main and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            after.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        yield


def _state(root: Path) -> str:
    names = [str(lock.parent) for lock in locks(root)]
    return f"Compiling: {', '.join(names)}." if names else f"No extension is being compiled in {root}."


def _has_builder(directory: Path) -> bool:
    """Return whether ninja or a compiler runs in the extension's directory."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended, or belongs to another user
            if Path(process.cwd()) == directory.resolve():
                return True
    return False
