"""Checkpoints that survive `kill -9`, a full disk and damaged files; a damaged one never causes a silent fresh start.

    checkpoints/
      latest                     "step-000012": for people; only the manifests decide
      step-000012/
        state.json manifest.json and whatever the caller wrote
      step-000013.tmp-1f2e3d4c/  a save that never finished

A directory gets its final name only when it is complete and on disk; from then on its manifest says what it must hold.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl4llm.core.errors import CheckpointError, RunDirError
from rl4llm.runs import manifest
from rl4llm.runs.run_dir import is_full, space, sync_directory, write_atomically
from rl4llm.runtime import devices
from rl4llm.runtime.gpus import GPU
from rl4llm.runtime.ranks import Ranks

FINAL = re.compile(r"step-(\d{6,})(\.old-[0-9a-f]+)?")
UNFINISHED = re.compile(r"step-\d{6,}\.tmp-[0-9a-f]+")
REPLACED = re.compile(r"step-\d{6,}\.old-[0-9a-f]+")
Write = Callable[[Path], Mapping[str, str] | None]
"""Fills a directory; returns the xxh3_64 of files that were hashed while they were written, by their path in it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose every byte was verified. `skipped` lists newer ones that were not used, and why."""

    path: Path
    step: int
    state: dict[str, Any]
    skipped: tuple[str, ...] = ()


def save_checkpoint(
    root: Path,
    step: int,
    write: Write,
    state: dict[str, Any],
    keep: int,
    ranks: Ranks | None = None,
    num_bytes: int = 0,
) -> Path:
    """Save step `step`: `write` fills a new directory, `state` is what JSON can hold; the newest `keep` remain.

    All ranks call `write`; the directory, the hashes and the state are the first one's. Raises CheckpointError when the
    disk is full or a file cannot be written; earlier checkpoints are then as they were. A save takes about `num_bytes`.
    """
    ranks = ranks or Ranks()
    directory = root / f"step-{step:06d}.tmp-{secrets.token_hex(4)}"
    if ranks.is_first:
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be created: {error.strerror}.") from error
    directory = ranks.share(directory)
    try:
        hashes = write(directory)
        ranks.wait()
        if ranks.is_first:
            _commit(directory, state, keep, hashes)
        ranks.wait()
        return _final(directory)
    except BaseException as error:
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, OSError | RunDirError) or is_full(error):
            raise CheckpointError(_failure(root, step, num_bytes, error)) from error
        raise


def _commit(
    directory: Path, state: dict[str, Any], keep: int, known_hashes: Mapping[str, str] | None
) -> None:
    """Seal a directory, give it its final name, and delete what is older than the last `keep`."""
    root, final = directory.parent, _final(directory)
    (directory / "state.json").write_text(json.dumps(state))
    manifest.seal(directory, known_hashes=known_hashes, step=_step(directory))
    # saved before, and perhaps damaged since: `.old-` is still found if we die between the renames
    if final.exists():
        final.rename(root / f"{final.name}.old-{secrets.token_hex(4)}")
    directory.rename(final)
    sync_directory(root)
    write_atomically(root / "latest", final.name + "\n")
    _prune(root, final, keep)


def latest_checkpoint(root: Path, run_id: str | None = None) -> Checkpoint | None:
    """Return the newest complete checkpoint, of run `run_id` if given; None if nothing was ever saved.

    Raise CheckpointError when checkpoints exist but all are damaged: training never starts over silently.
    """
    candidates = sorted(_finals(root), key=lambda path: (_step(path), path.suffix == ""), reverse=True)
    skipped: list[str] = [f"{path.name}: a save that was interrupted" for path in unfinished_saves(root)]
    for path in candidates:
        problem = manifest.damage(path, step=_step(path))
        if problem is None:
            state = _read_state(path)
            owner = state.get("run", run_id)
            if run_id in (None, owner):
                return Checkpoint(path, _step(path), state, tuple(skipped))
            problem = f"it belongs to the run {owner}, but this run is {run_id}"
        skipped.append(f"{path.name}: {problem}")
    if candidates or (root / "latest").exists():
        raise CheckpointError(
            f"No checkpoint in {root} can be used:\n  "
            + "\n  ".join(skipped or ["latest exists, but every checkpoint is gone"])
            + "\nNext: restore one from a backup, or start over in another output.dir."
        )
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint of a directory; raise CheckpointError if it is damaged or not a checkpoint."""
    if not FINAL.fullmatch(path.name):
        raise CheckpointError(
            f"{path} is not a checkpoint. Accepted: a directory such as checkpoints/step-000012."
        )
    if problem := manifest.damage(path, step=_step(path)):
        raise CheckpointError(f"{path} cannot be used: {problem}. Next: choose another checkpoint.")
    return Checkpoint(path, _step(path), _read_state(path))


def unfinished_saves(root: Path) -> list[Path]:
    """Return the directories of interrupted saves; the next save removes them."""
    return sorted(path for path in _entries(root) if UNFINISHED.fullmatch(path.name))


def _prune(root: Path, newest: Path, keep: int) -> None:
    """Delete leftovers, what is older than `keep`, and later steps, which a resume from an older one has abandoned."""
    finals = sorted((path for path in _finals(root) if not path.suffix), key=_step)
    newest_paths = [path for path in finals if _step(path) <= _step(newest)][-keep:]
    for path in [path for path in finals if path not in newest_paths]:
        path.rename(path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}"))
    for path in list(_entries(root)):
        if UNFINISHED.fullmatch(path.name) or REPLACED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith("latest.tmp-"):
            path.unlink()


def _failure(root: Path, step: int, num_bytes: int, error: BaseException) -> str:
    names = ", ".join(sorted(path.name for path in _finals(root))) or "none"
    return (
        f"The checkpoint of step {step} could not be written to {root}: {str(error).rstrip('.')}."
        f"{space(root, num_bytes, error)} Intact checkpoints: {names}. Free some space, or keep fewer (checkpoint.keep)."
    )


def _final(directory: Path) -> Path:
    """Return the name that the directory of a save gets when it is whole."""
    return directory.with_name(directory.name.partition(".")[0])


def _read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / "state.json").read_text())


def _entries(root: Path) -> Iterator[Path]:
    return root.iterdir() if root.is_dir() else iter(())


def _finals(root: Path) -> list[Path]:
    return [path for path in _entries(root) if FINAL.fullmatch(path.name) and path.is_dir()]


def _step(path: Path) -> int:
    return int(path.name.partition(".")[0].removeprefix("step-"))


def rng_state() -> dict[str, Any]:
    """Return the state of every global generator, as values that JSON can hold.

    rl4llm does not draw from them (see `rl4llm.runtime.seeds`), but environments and rewards of users do, and dropout.
    """
    version, numbers, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    return {
        "torch": _hex(torch.get_rng_state()),
        "devices": {
            name: _hex(devices.call(name, "get_rng_state", torch.device(name))) for name in devices.names()
        },
        "python": [version, list(numbers), gauss],
        "numpy": {
            **legacy,
            "state": {"key": legacy["state"]["key"].tolist(), "pos": int(legacy["state"]["pos"])},
        },
    }


def restore_rng(state: dict[str, Any]) -> tuple[str, ...]:
    """Restore what `rng_state` returned. Return a message for each part that could not be, such as that of missing GPUs."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    inner = state["numpy"]["state"]
    key = np.array(inner["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {"key": key, "pos": inner["pos"]}})
    torch.set_rng_state(_tensor(state["torch"]))
    earlier = {f"{GPU}:{index}": text for index, text in enumerate(state.get(GPU, ()))}
    saved, names = state.get("devices", earlier), devices.names()
    for name in saved.keys() & names:
        devices.call(name, "set_rng_state", _tensor(saved[name]), torch.device(name))
    if saved.keys() == set(names):
        return ()
    return (
        f"The random states of [{', '.join(saved)}] were saved, but this machine has [{', '.join(names)}].",
    )


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
