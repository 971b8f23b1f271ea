"""Write episodes as a dataset with messages and rewards, which `sft` can learn from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from rl4llm.core.errors import ConfigError
from rl4llm.core.types import Trajectory
from rl4llm.data.answers import empty_reply
from rl4llm.data.demonstrations import as_row
from rl4llm.runs.run_dir import replace_directory


def check_target(target: Path) -> None:
    """Raise ConfigError or OSError, before anything is sampled, if episodes cannot be written to `target`."""
    if target.suffix and target.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"{target} is not accepted. Accepted: .jsonl or .parquet, or a directory without a suffix."
        )
    if target.exists():
        raise ConfigError(f"{target} exists. Next: remove it, or choose another path.")
    target.parent.mkdir(parents=True, exist_ok=True)
    _beside(target).touch()
    _beside(target).unlink()


def write_episodes(
    episodes: Iterable[Trajectory], target: Path, min_reward: float | None = None
) -> tuple[int, int]:
    """Write episodes to `target`, and return how many were written and how many there were.

    With `min_reward`, write only those that are worth imitating: with at least this reward and no empty reply, which
    `sft` refuses. `target` exists only when it is complete. Raise ConfigError if no episode is left.
    """
    part, written, total = _beside(target), 0, 0
    try:
        with open(part, "w", encoding="utf-8") as file:
            for episode in episodes:
                total += 1
                good = min_reward is None or episode.reward >= min_reward
                if good and (min_reward is None or empty_reply(episode.messages) is None):
                    file.write(json.dumps(as_row(episode)) + "\n")
                    written += 1
        if not written:
            raise ConfigError(
                f"None of {total} episodes has a reward of at least {min_reward} and no empty reply."
            )
        _finish(part, target)
    finally:
        part.unlink(missing_ok=True)
    return written, total


def _finish(part: Path, target: Path) -> None:
    if target.suffix == ".jsonl":
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        part.rename(target)
        return
    from datasets import Dataset  # noqa: PLC0415 - slow to import

    rows = Dataset.from_list([json.loads(line) for line in part.read_text(encoding="utf-8").splitlines()])
    if target.suffix == ".parquet":
        rows.to_parquet(part)
        part.rename(target)
    else:
        replace_directory(target, rows.save_to_disk)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")
