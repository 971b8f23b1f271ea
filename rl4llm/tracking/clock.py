"""How long each phase of a step took, and how much memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds of named phases, on a clock that never jumps.

        with clock("rollout"):
            ...
        clock.lap()     # {"time/rollout": 1.52, "memory/rollout": 0.83}, and starts again from zero

    Phases may nest: the inner one counts in both. `on_phase` is told the name of each phase as it begins. `peak` says the
    most memory, in GB, since it was last asked; without it none is measured.
    """

    def __init__(
        self,
        on_phase: Callable[[str], None] | None = None,
        now: Callable[[], float] = time.monotonic,
        peak: Callable[[], float] | None = None,
    ):
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._open: list[str] = []
        self._on_phase = on_phase
        self._now = now
        self._peak = peak

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase, also one that ends in an exception; inside itself it counts once."""
        inside_itself = phase in self._open
        self._look()
        started = self._now()
        self._open.append(phase)
        if self._on_phase:
            self._on_phase(phase)
        try:
            yield
        finally:
            self._look()
            self._open.remove(phase)
            if not inside_itself:
                self._seconds[phase] = self._seconds.get(phase, 0.0) + self._now() - started

    def lap(self) -> dict[str, float]:
        """Seconds by "time/<phase>" and the most GB by "memory/<phase>" since the last lap; a phase still open counts in the
        lap that it ends in."""
        seconds, self._seconds = self._seconds, {}
        peaks = {phase: self._peaks.pop(phase) for phase in list(self._peaks) if phase not in self._open}
        return {f"time/{phase}": value for phase, value in seconds.items()} | {
            f"memory/{phase}": value for phase, value in peaks.items()
        }

    def _look(self) -> None:
        """What was taken since the last look is of all phases that are open."""
        peak = self._peak() if self._peak else None
        if peak is not None:
            self._peaks |= {phase: max(peak, self._peaks.get(phase, 0.0)) for phase in self._open}
