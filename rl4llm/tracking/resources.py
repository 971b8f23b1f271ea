"""Measure what a run takes of its machine: the time and memory of each phase of a step, and processor time."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rl4llm.runtime import devices
from rl4llm.tracking.tracker import TimedPhase

GB = 1e9
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
LOWER_THE_MARK = "5"  # proc_pid_clear_refs(5): the high-water mark becomes what is resident now


class PhaseClock:
    """Adds up the seconds of named phases, on a clock that never jumps.

        with clock("rollout"):
            ...
        clock.lap()     # {"time/rollout": 1.52, "memory/rollout": 0.83}, and starts again from zero
        clock.lapped    # (TimedPhase("rollout", 1790000000.0, 1790000001.52),): when the phases of that lap ran

    Phases may nest: the inner one counts in both. `on_phase` receives the name of each phase when it begins. `peak` returns
    the peak memory, in GB, since its last call; without it no memory is measured.
    """

    def __init__(
        self,
        on_phase: Callable[[str], None] | None = None,
        now: Callable[[], float] = time.monotonic,
        peak: Callable[[], float] | None = None,
    ):
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._ended: list[TimedPhase] = []
        self.lapped: tuple[TimedPhase, ...] = ()
        self._epoch = time.time() - now()
        self._open: list[str] = []
        self._on_phase = on_phase
        self._now = now
        self._peak = peak

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase, even if it raises; a phase inside itself counts once."""
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
                ended = self._now()
                self._seconds[phase] = self._seconds.get(phase, 0.0) + ended - started
                self._ended.append(TimedPhase(phase, self._epoch + started, self._epoch + ended))

    def lap(self) -> dict[str, float]:
        """Return the seconds as "time/<phase>" and the peak GB as "memory/<phase>" since the last lap. An open phase counts
        in the lap in which it ends."""
        seconds, self._seconds = self._seconds, {}
        self.lapped, self._ended = tuple(self._ended), []
        peaks = {phase: self._peaks.pop(phase) for phase in list(self._peaks) if phase not in self._open}
        return {f"time/{phase}": value for phase, value in seconds.items()} | {
            f"memory/{phase}": value for phase, value in peaks.items()
        }

    def _look(self) -> None:
        """Charge the peak since the last call to all open phases."""
        peak = self._peak() if self._peak else None
        if peak is not None:
            self._peaks |= {phase: max(peak, self._peaks.get(phase, 0.0)) for phase in self._open}


class Resources:
    """Measures CPU and memory of this process, and of its GPU."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first answer is always 0
        self._peak_rss = self._peak_gpu = 0  # before the marks were last lowered

    def metrics(self) -> dict[str, float]:
        """Return numbers by name. CPU is in percent of one core since the last call, memory in GB (1e9 bytes)."""
        metrics = {
            "resources/cpu_percent": self._process.cpu_percent(),
            "resources/rss_gb": self._process.memory_info().rss / GB,
            "resources/peak_rss_gb": max(self._peak_rss, _high_water_mark()) / GB,
        }
        if (memory := devices.memory()) is not None:
            allocated, peak, reserved = memory
            metrics["resources/gpu_gb"] = allocated / GB
            metrics["resources/peak_gpu_gb"] = max(self._peak_gpu, peak) / GB
            metrics["resources/gpu_reserved_gb"] = reserved / GB
        return metrics

    def peak_gb(self) -> float:
        """Return the peak memory in GB since the last call: allocated on the GPU of this process, otherwise resident.

        Without a resettable high-water mark, which Linux has, it is the memory that is resident now.
        """
        if (memory := devices.memory()) is not None:
            devices.call(devices.accelerator(), "reset_peak_memory_stats")
            self._peak_gpu = max(self._peak_gpu, memory[1])
            return memory[1] / GB
        peak = _high_water_mark()
        self._peak_rss = max(self._peak_rss, peak)
        try:
            CLEAR.write_text(LOWER_THE_MARK)
        except OSError:
            peak = self._process.memory_info().rss
        return peak / GB


def _high_water_mark() -> int:
    """Return the peak of resident memory, in bytes, since the mark was lowered or the process began."""
    if not STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
