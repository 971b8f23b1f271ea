"""The output directory of a run: its layout, its one owner, and writing into it so that nothing is ever half there.

    config.yaml  run.json  metrics.jsonl  eval.jsonl  alerts.jsonl  learning_curve.png  episodes/  tensorboard/  checkpoints/
    weights/  model/ (the trained model, when the run is done)  failed/ (steps that could not be taken)  .lock
    logs/ (of servers and hosts that were started with the run)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rl4llm
from rl4llm.core.errors import RunDirError
from rl4llm.core.lock import DirectoryLock

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOTHING = object()


class RunDir:
    """An output directory. The constructor only names its files; `open` makes the directory this process's own.

        with RunDir.open("runs/gsm8k", {"model": "Qwen/Qwen2.5-0.5B", "algorithm": "grpo", "seed": 1}) as run:
            run.write_text("config.yaml", text)

    After `open`: `run_id`, `created`, `resumed` (the run was there before), `changes` (what differs from its last start)
    and `warnings` (what the user should know).
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).expanduser()
        self.config_file = self.path / "config.yaml"
        self.run_file = self.path / "run.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.eval_file = self.path / "eval.jsonl"
        self.alerts_file = self.path / "alerts.jsonl"
        self.curve_file = self.path / "learning_curve.png"
        self.episodes_dir = self.path / "episodes"
        self.tensorboard_dir = self.path / "tensorboard"
        self.checkpoints_dir = self.path / "checkpoints"
        self.weights_dir = self.path / "weights"
        self.model_dir = self.path / "model"
        self.failed_dir = self.path / "failed"
        self.logs_dir = self.path / "logs"
        self.run_id = ""
        self.created = ""
        self.resumed = False
        self.changes: tuple[str, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self._lock: DirectoryLock | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        fingerprint: Mapping[str, Any],
        *,
        settings: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        allow_changes: bool = False,
    ) -> RunDir:
        """Create a run directory or go on with one, and own it until `close`.

        `fingerprint` says what makes this run this run (model, algorithm, data, seed), in values that JSON knows;
        `settings` may differ from one start to the next, and are told when they do. A run that is older than a key of these
        was made with what `defaults` say.
        Raises RunDirError when another process owns the directory, when it holds something else, and, unless
        `allow_changes`, when it holds a run with another fingerprint.
        """
        run = cls(path)
        run._claim()
        try:
            identity = {"fingerprint": dict(fingerprint), "settings": dict(settings or {})}
            run._identify(json.loads(json.dumps(identity)), json.loads(json.dumps(dict(defaults or {}))), allow_changes)
        except BaseException:
            run.close()
            raise
        return run

    def close(self) -> None:
        """Let the directory go."""
        if self._lock:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write_text(self, name: str, text: str) -> Path:
        """Write a file of the run, whole or not at all."""
        write_atomically(self.path / name, text)
        return self.path / name

    def make_logs(self) -> None:
        """Make the directory for what other processes of the run say, before the trainer opens the run."""
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()
            self.logs_dir.mkdir(exist_ok=True)
            for probe in (self.path, self.logs_dir):  # before anything starts that would find out later
                tempfile.TemporaryFile(dir=probe).close()

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, NotADirectoryError):
            raise RunDirError(f"output.dir={str(self.path)!r} is a file, not a directory; give another one.") from None
        except OSError as error:
            raise RunDirError(f"output.dir={str(self.path)!r} cannot be used: {error.strerror}.") from error

    def _claim(self) -> None:
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()
            self._lock = DirectoryLock(self.path)
        for leftover in self.path.glob("*.tmp-*"):
            if leftover.is_file():
                leftover.unlink()
        if not self._lock.supported:
            self.warnings = (f"The filesystem of {self.path} has no locks: nothing stops a second trainer here.",)

    def _refuse_foreign(self) -> None:
        if self.run_file.exists():
            return
        ours = (".lock", self.logs_dir.name)
        foreign = sorted(item.name for item in self.path.iterdir() if item.name not in ours and ".tmp-" not in item.name)
        if foreign:
            shown = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
            raise RunDirError(
                f"output.dir={str(self.path)!r} is not empty and is not a run of rl4llm (it has no run.json, but holds "
                f"{shown}). Accepted: a new or empty directory, or that of an earlier run. Next: give another output.dir."
            )

    def _identify(self, given: dict[str, Any], defaults: dict[str, Any], allow_changes: bool) -> None:
        self.resumed = self.run_file.exists()
        was = self._read_identity() if self.resumed else _new_identity() | given
        self.run_id, self.created = was["run_id"], was["created"]
        changes = _differences(was["fingerprint"], given["fingerprint"], defaults)
        if changes and not allow_changes:
            raise RunDirError(
                f"output.dir={str(self.path)!r} holds another run ({self.run_id}). What differs (was -> given):\n  "
                + "\n  ".join(changes)
                + "\nNext: give the old values back, choose another output.dir, or go on all the same with --force "
                "(allow_changes=True)."
            )
        self.changes = changes + _differences(was.get("settings", given["settings"]), given["settings"], defaults)
        if {**was, **given} != was or not self.resumed:
            write_atomically(self.run_file, json.dumps({**was, **given}, indent=2) + "\n")

    def _read_identity(self) -> dict[str, Any]:
        try:
            identity = json.loads(self.run_file.read_text())
            str(identity["run_id"]), str(identity["created"]), dict(identity["fingerprint"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise RunDirError(
                f"{self.run_file} is damaged ({type(error).__name__}: {error}), so it is unknown which run this is. "
                "Next: give another output.dir, or restore the file."
            ) from error
        return identity


def write_atomically(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Replace a file: readers see the old content or the new, also after a crash. Text is UTF-8.

    Raises RunDirError when it cannot be written; the old file is then as it was. What is there and no file, such as
    /dev/null, is left alone: the new file would take its place.
    """
    path, data = Path(path), data.encode() if isinstance(data, str) else data
    if path.exists() and not path.is_file():
        raise RunDirError(f"{path} cannot be written: it is there and no file. Next: give the name of a file.")
    beside = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_directory(path.parent)
    except OSError as error:
        detail = f" {space(path.parent, len(data))}" if is_full(error) else ""
        raise RunDirError(f"{path} cannot be written: {error.strerror}.{detail}") from error
    finally:
        with contextlib.suppress(OSError):  # where nothing may be written, nothing may be removed
            beside.unlink()


def replace_directory(directory: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a new directory, and put it in the place of `directory` when it is whole and on disk."""
    scratch = directory.with_name(f"{directory.name}.tmp-{secrets.token_hex(4)}")
    try:
        scratch.mkdir(parents=True)
        write(scratch)
        for file in scratch.rglob("*"):
            if file.is_file():
                sync_file(file)
        if directory.exists():
            directory.rename(scratch.with_name(f"{directory.name}.old-{secrets.token_hex(4)}"))
        scratch.rename(directory)
        sync_directory(directory.parent)
    except OSError as error:
        detail = f" {space(directory.parent, 0)}" if is_full(error) else ""
        raise RunDirError(f"{directory} cannot be written: {error.strerror or error}.{detail}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for leftover in directory.parent.glob(f"{directory.name}.old-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def sync_file(path: Path) -> None:
    """Make a file's content survive a power cut."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk or a quota is full, also where a library wrapped the system's error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    codes = "|".join(str(code) for code in FULL)
    return re.search(rf"os error ({codes})\b|No space left|PytorchStreamWriter failed writing", str(error)) is not None


def space(directory: Path, needed: int) -> str:
    """What a write needs and what there is, for messages."""
    free = shutil.disk_usage(directory).free
    return f"Needed: {needed:,} bytes; free: {free:,} bytes."


def _new_identity() -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "run_id": f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
        "created": now.isoformat("T", "seconds"),
        "rl4llm": rl4llm.__version__,
    }


def _differences(was: Mapping[str, Any], given: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """What two fingerprints disagree on, one line per dotted key; the old one may lack keys that have a default."""
    new = dict(_flat(given))
    old = {key: value for key, value in _flat(defaults) if key in new} | dict(_flat(was))
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key, NOTHING) != new.get(key, NOTHING))
    return tuple(f"{key}: {_shown(old, key)} -> {_shown(new, key)}" for key in keys)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "nothing"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
