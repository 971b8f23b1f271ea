"""Show which rank is in which phase, and which rank waits for the others, when a phase takes long.

A rank that is in one phase for more than `SLOW_S` seconds writes it into a file of the run's directory, `.waiting-3`, and
removes the file afterwards. The first rank reads these files. Fast phases write nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rl4llm.runtime.ranks import Ranks
from rl4llm.runtime.threads import repeated
from rl4llm.tracking.console import duration

SLOW_S = 10.0
LOOK_S = 1.0
FIRST_LINE_S = 60.0  # in plain output; then after twice as long, and so on


class Waiting:
    """Follows this rank's phases, and shows those of all ranks on the first one.

    In plain output, `say` receives a line after a minute without progress, and then at doubling intervals.
    """

    def __init__(
        self, directory: Path, ranks: Ranks, say: Callable[[str], None] | None = None, slow_s: float = SLOW_S
    ):
        self._directory = directory
        self._ranks = ranks
        self._say = say
        self._slow_s = slow_s
        self._phase = ""
        self._since = time.time()
        self._next_line_s = FIRST_LINE_S
        self._told: tuple[Any, ...] | None = None
        self._watching = ExitStack()

    def start(self) -> None:
        """Watch in a thread until `stop`."""
        for left in self._directory.glob(".waiting-*") if self._ranks.is_first else ():
            left.unlink(missing_ok=True)
        self._watching.callback(self._file.unlink, missing_ok=True)
        self._watching.enter_context(repeated(min(LOOK_S, self._slow_s / 2), self._look, "waiting"))

    def stop(self) -> None:
        self._watching.close()

    def phase(self, name: str) -> None:
        """Begin a phase."""
        self._phase, self._since, self._next_line_s = name, time.time(), FIRST_LINE_S

    def lines(self) -> list[str]:
        """Return a line for each rank once the first one is slow; nothing for a single process."""
        if self._ranks.size == 1 or time.time() - self._since < self._slow_s:
            return []
        others = {int(file.name.partition("-")[2]): file for file in self._directory.glob(".waiting-*")}
        first = _words(self._phase, self._since, self._ranks.waits)
        found = {0: first, **{rank: self._read(file) for rank, file in others.items()}}
        return [f"rank {rank} {found.get(rank) or 'is running'}" for rank in range(self._ranks.size)]

    @property
    def _file(self) -> Path:
        return self._directory / f".waiting-{self._ranks.rank}"

    def _look(self) -> None:
        with suppress(OSError):  # other writers report a full disk
            if self._ranks.is_first:
                self._speak()
            else:
                self._show()

    def _show(self) -> None:
        now = (
            (self._phase, self._since, self._ranks.waits)
            if time.time() - self._since > self._slow_s
            else None
        )
        if now == self._told:
            return
        if now is None:
            self._file.unlink(missing_ok=True)
        else:
            self._file.write_text(json.dumps(now))
        self._told = now

    def _speak(self) -> None:
        seconds = time.time() - self._since
        if self._say is None or seconds < self._next_line_s:
            return
        self._next_line_s *= 2
        self._say(
            "; ".join(self.lines()) or f"still in {self._phase or 'start-up'} after {duration(seconds)}"
        )

    def _read(self, file: Path) -> str:
        try:
            phase, since, waits = json.loads(file.read_text())
        except (OSError, ValueError, TypeError):
            return ""  # the rank is running again
        return _words(phase, since, waits)


def _words(phase: str, since: float, waits: bool) -> str:
    how = "waits for the others in" if waits else "is in"
    return f"{how} {phase or 'start-up'}, for {duration(max(0.0, time.time() - since))}"
