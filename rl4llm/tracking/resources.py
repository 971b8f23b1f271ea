"""What a run takes of its machine."""

from __future__ import annotations

import resource
import sys

import psutil
import torch

GB = 1e9
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


class Resources:
    """CPU and memory of this process, and of the GPU it computes on."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first answer is always 0

    def metrics(self) -> dict[str, float]:
        """Numbers by name. CPU is in percent of one core since the last call, memory in GB (1e9 bytes)."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
        metrics = {
            "resources/cpu_percent": self._process.cpu_percent(),
            "resources/rss_gb": self._process.memory_info().rss / GB,
            "resources/peak_rss_gb": peak / GB,
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            metrics["resources/gpu_gb"] = torch.cuda.memory_allocated() / GB
            metrics["resources/peak_gpu_gb"] = torch.cuda.max_memory_allocated() / GB
            metrics["resources/gpu_reserved_gb"] = torch.cuda.memory_reserved() / GB
        return metrics
