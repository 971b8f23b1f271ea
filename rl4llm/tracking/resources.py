"""What a run takes of its machine."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import torch

GB = 1e9
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
LOWER_THE_MARK = "5"  # proc_pid_clear_refs(5): the high-water mark becomes what is resident now


class Resources:
    """CPU and memory of this process, and of the GPU it computes on."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first answer is always 0
        self._peak_rss = self._peak_gpu = 0  # before the marks were last lowered

    def metrics(self) -> dict[str, float]:
        """Numbers by name. CPU is in percent of one core since the last call, memory in GB (1e9 bytes)."""
        metrics = {
            "resources/cpu_percent": self._process.cpu_percent(),
            "resources/rss_gb": self._process.memory_info().rss / GB,
            "resources/peak_rss_gb": max(self._peak_rss, _high_water_mark()) / GB,
        }
        if _on_gpu():
            metrics["resources/gpu_gb"] = torch.cuda.memory_allocated() / GB
            metrics["resources/peak_gpu_gb"] = max(self._peak_gpu, torch.cuda.max_memory_allocated()) / GB
            metrics["resources/gpu_reserved_gb"] = torch.cuda.memory_reserved() / GB
        return metrics

    def peak_gb(self) -> float:
        """The most memory since the last call: allocated on the GPU that this process computes on, else resident.

        Where the system keeps no mark that can be lowered, as Linux does, it is what is resident now.
        """
        if _on_gpu():
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self._peak_gpu = max(self._peak_gpu, peak)
            return peak / GB
        peak = _high_water_mark()
        self._peak_rss = max(self._peak_rss, peak)
        try:
            CLEAR.write_text(LOWER_THE_MARK)
        except OSError:
            peak = self._process.memory_info().rss
        return peak / GB


def _on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _high_water_mark() -> int:
    """The most that was resident, in bytes, since the mark was lowered or the process began."""
    if not STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
