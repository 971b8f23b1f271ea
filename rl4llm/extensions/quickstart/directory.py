"""The directory of a quickstart: a marker names its options, so a start never touches the files of something else."""

from __future__ import annotations

import shutil
from pathlib import Path

from rl4llm.core.errors import ConfigError
from rl4llm.runs.run_dir import write_atomically

MARKER = ".quickstart"
WRITTEN = (MARKER, "model", "warm", "data/train.jsonl")


def check_directory(directory: Path, seed: int) -> None:
    """Raise ConfigError if a directory has files, and is not that of a quickstart with these options."""
    try:
        names = sorted(item.name for item in directory.iterdir() if not item.name.startswith("."))
    except OSError:  # it is made later, or named in an error then
        return
    marker, options = directory / MARKER, f"--seed {seed}"
    if names and not marker.is_file():
        raise ConfigError(
            f"--dir {directory} has files that are not of a quickstart: {', '.join(names[:5])}. Accepted: a new or empty "
            "directory, or that of a quickstart, which then resumes."
        )
    if names and (found := marker.read_text()) != options:
        raise ConfigError(
            f"--dir {directory} is of `rl4llm recipe quickstart {found}`, not {options}. Next: use its options to resume "
            "it, or another --dir."
        )


def mark_directory(directory: Path, seed: int) -> None:
    """Make a directory that of a quickstart; remove what a killed start left half written."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / MARKER, f"--seed {seed}")
    for leftover in (path for name in WRITTEN for path in directory.glob(f"{name}.tmp-*")):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
