"""Runs configurations, each twice as long as its optimizer needs to have its moments, and writes the memory they took.

    python measured_runs.py '{"warm": [{...}, 0], "name": [{...}, planned bytes]}' took.json

The first one only warms up: what is imported and allocated once belongs to no run. Blocks above 1 MiB are mapped by
themselves and given back when they are freed, so what is resident is what is in use: a run itself keeps freed blocks.
"""

import ctypes
import gc
import json
import re
import sys
from pathlib import Path

from rl4llm.compose import build_trainer
from rl4llm.config import load_config
from rl4llm.tracking.run import RunTracker

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, MIB = -1, -2, -3, 1 << 20
CLOSE = 0.1
LIBC = ctypes.CDLL(None)


def resident():
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def peaks(overrides):
    """The most that was resident in each phase beyond what was before, in bytes."""
    gc.collect()
    LIBC.malloc_trim(0)
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")
    with build_trainer(load_config(None, overrides)) as trainer:
        LIBC.mallopt(M_MMAP_THRESHOLD, MIB)
        LIBC.mallopt(M_TRIM_THRESHOLD, MIB)
        LIBC.mallopt(M_TOP_PAD, 0)
        LIBC.malloc_trim(0)
        trainer.train()
    rows = [
        json.loads(line)
        for line in (Path(overrides["output.dir"]) / "metrics.jsonl").read_text().splitlines()
    ]
    named = [(name, value) for row in rows for name, value in row.items() if name.startswith("memory/")]
    return {name: max(value for other, value in named if other == name) * 1e9 - before for name, _ in named}


def measured(overrides, planned):
    """Return what `peaks` does, of a second run too where the first is not close to the plan, the smaller of each.

    On a busy machine one of many runs may hold more for a moment.
    """
    taken = peaks({**overrides, "output.dir": f"{overrides['output.dir']}-0"})
    if abs(max(taken.values()) - planned) <= CLOSE * planned:
        return taken
    again = peaks({**overrides, "output.dir": f"{overrides['output.dir']}-1"})
    return {phase: min(again[phase], size) for phase, size in taken.items()}


if __name__ == "__main__":
    RunTracker._draw_curve = lambda self, step: None  # half of the time of a short run
    (_, (warm_up, _)), *runs = json.loads(sys.argv[1]).items()
    peaks(warm_up)
    Path(sys.argv[2]).write_text(json.dumps({name: measured(*run) for name, run in runs}))
