"""Sums such as "12 + 7 = ?" in two files: the task of the pretrained model. The held-out ones are never trained on."""

from __future__ import annotations

import json
import random
from pathlib import Path

from rl4llm.runs.run_dir import write_atomically

HELD_OUT = 128
LARGEST = 20


def sums() -> list[dict[str, str]]:
    """Return all sums and differences of 1 to 20 without a negative result, in a fixed random order."""
    numbers = range(1, LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    rows = [{"question": f"{a} + {b} = ?", "answer": str(a + b)} for a, b in pairs]
    rows += [{"question": f"{a} - {b} = ?", "answer": str(a - b)} for a, b in pairs if a >= b]
    random.Random(0).shuffle(rows)
    return rows


def write_sums(directory: Path) -> dict[Path, int]:
    """Write test.jsonl with the held-out sums, and train.jsonl with the others; return the number of rows of each file."""
    directory.mkdir(parents=True, exist_ok=True)
    rows, written = sums(), {}
    for split, part in {"test": rows[:HELD_OUT], "train": rows[HELD_OUT:]}.items():
        file = directory / f"{split}.jsonl"
        write_atomically(file, "".join(json.dumps(row) + "\n" for row in part))
        written[file] = len(part)
    return written
