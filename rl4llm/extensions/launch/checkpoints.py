"""List and delete the checkpoints of a run, given only its directory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rl4llm.core.errors import CheckpointError, ConfigError
from rl4llm.runs.checkpoint import read_checkpoint


def listed(root: Path) -> str:
    """Return a line for each checkpoint of the run in `root`, oldest first. Raises ConfigError if there is no run."""
    found = _found(root)
    whole = {step: _damage(path) is None for step, path in found.items()}
    newest = max((step for step in whole if whole[step]), default=None)
    lines = [
        f"step {step:>8}  {_size(path):>15,} bytes  {_damage(path) or 'intact'}{', newest' * (step == newest)}"
        for step, path in found.items()
    ]
    return "\n".join(lines) or f"{root} has no checkpoints yet."


def clear(root: Path, steps: Sequence[int] = ()) -> str:
    """Delete checkpoints, by default all except the newest intact one, which the run resumes from; return a message.

    Raises ConfigError, and deletes nothing, for steps that do not exist and for the newest intact checkpoint.
    """
    found = _found(root)
    newest = max((step for step, path in found.items() if _damage(path) is None), default=None)
    if newest is None and not steps:
        raise ConfigError(
            f"No checkpoint in {root} is intact. Next: pass the steps to delete, from {_shown(found)}."
        )
    chosen = list(dict.fromkeys(steps)) or [step for step in found if step != newest]
    for step in chosen:
        if step not in found:
            raise ConfigError(
                f"steps={step} is not accepted. The checkpoints of {root} are: {_shown(found)}."
            )
        if step == newest:
            raise ConfigError(
                f"steps={step} is the newest checkpoint of {root}, which the run resumes from. Next: to abandon the run, "
                "delete its directory."
            )
    for step in chosen:
        shutil.rmtree(found[step])
    return f"Deleted {_shown(chosen)} of {root}." if chosen else f"{root} has only its newest checkpoint."


def _found(root: Path) -> dict[int, Path]:
    """Return the checkpoints by step."""
    if not (root / "run.json").exists():
        beside = sorted(path.name for path in root.parent.glob("*/") if (path / "run.json").exists())
        raise ConfigError(f"{root} does not contain a run. Runs next to it: {', '.join(beside) or 'none'}.")
    paths = {path.name.removeprefix("step-"): path for path in (root / "checkpoints").glob("step-*/")}
    return {int(name): path for name, path in sorted(paths.items()) if name.isdecimal()}


def _damage(path: Path) -> str | None:
    try:
        read_checkpoint(path)
    except CheckpointError as error:
        return f"damaged: {str(error).partition(' cannot be used: ')[2].partition('. Next')[0]}"
    return None


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _shown(steps: Sequence[int] | dict[int, Path]) -> str:
    return ", ".join(map(str, steps)) or "none"
