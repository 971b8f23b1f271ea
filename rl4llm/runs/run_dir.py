"""The output directory of a run: its layout, its one owner, and atomic writes into it.

config.yaml  run.json  metrics.jsonl  eval.jsonl  alerts.jsonl  learning_curve.png  events.out.tfevents.*
episodes/  checkpoints/  weights/  model/ (the trained model, when the run has finished)  failed/ (non-finite steps)  .lock
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import rl4llm
from rl4llm.core.errors import RunDirError
from rl4llm.core.redact import redacted, redacted_text
from rl4llm.runs.lock import DirectoryLock

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
FULL = (*NO_SPACE, errno.EFBIG)
NOTHING = object()
PRIVATE = 0o600


@dataclass(frozen=True, slots=True)
class _Claim:
    """What `RunDir.claim` will write, see `RunDir.planned`; a file is its content and whether it is private."""

    identity: dict[str, Any]
    defaults: dict[str, Any]
    allow_changes: bool
    files: dict[str, tuple[str, bool]]


class RunDir:
    """An output directory. The constructor only names its files; `open` locks the directory for this process.

        with RunDir.open("runs/gsm8k", {"model": "Qwen/Qwen2.5-0.5B", "algorithm": "grpo", "seed": 1}) as run:
            run.write_text("config.yaml", text)

    `planned` and `claim` are `open` in two steps. The first only reads. After `claim`: `run_id`, `created`, `resumed` (the
    run existed before), `changes` (what differs from its last start) and `warnings` (what the user should know).
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
        self._plan: _Claim | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str], fingerprint: Mapping[str, Any], **options: Any) -> RunDir:
        """Create a run directory or resume one, and lock it until `close`. The options are those of `planned`."""
        run = cls.planned(path, fingerprint, **options)
        run.claim()
        return run

    @classmethod
    def planned(
        cls,
        path: str | os.PathLike[str],
        fingerprint: Mapping[str, Any],
        *,
        settings: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        allow_changes: bool = False,
    ) -> RunDir:
        """Return a run directory that `claim` will create or resume. Nothing is written yet.

        `fingerprint` says what makes this run this run (model, algorithm, data, seed), in values that JSON knows;
        `settings` may differ from one start to the next, and are reported when they do. Keys that an older run lacks have
        the values of `defaults`. Secrets must be hidden in all of them.
        Raises RunDirError when the directory holds something else, and, unless `allow_changes`, when it holds a run with
        another fingerprint.
        """
        run = cls(path)
        identity = {"fingerprint": dict(fingerprint), "settings": dict(settings or {})}
        facts, default = json.loads(json.dumps([identity, dict(defaults or {})]))
        run._plan = _Claim(facts, default, allow_changes, {})
        run.hold({})
        return run

    def hold(self, contents: Mapping[str, str]) -> None:
        """Let the identity also have digests, by names that say what has them; raise RunDirError as `planned` does.

        Those whose name an earlier start did not write are not compared.
        """
        assert self._plan is not None  # it is `planned`
        self._plan.identity["contents"] = {redacted_text(name): contents[name] for name in contents}
        with self._usable():
            if self.path.exists():
                self._refuse_foreign()
                self._identified(self._plan)

    def keep(self, name: str, text: str, *, private: bool = False) -> None:
        """Let `claim` write a file of the run; a `private` one is for its owner only."""
        assert self._plan is not None  # it is `planned`
        self._plan.files[name] = (text, private)

    def claim(self) -> None:
        """Lock the directory until `close`, and write what identifies the run. A second call does nothing.

        Raise RunDirError as `planned` does, and when another process has locked the directory.
        """
        if self._lock:
            return
        assert self._plan is not None  # it is `planned`
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()
            try:
                self._lock = DirectoryLock(self.path)
            except RunDirError as error:
                raise RunDirError(f"{error} Stop it, or choose another output.dir.") from error
        for leftover in self.path.glob("*.tmp-*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if not self._lock.supported:
            self.warnings = (
                f"The filesystem of {self.path} has no locks, so a second trainer in this directory would not be detected.",
            )
        try:
            identity = self._identified(self._plan)
            if identity is not None:
                write_atomically(self.run_file, json.dumps(identity, indent=2) + "\n", mode=PRIVATE)
            for name, (text, private) in self._plan.files.items():
                self.write_text(name, text, private=private)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the directory."""
        if self._lock:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write_text(self, name: str, text: str, *, private: bool = False) -> Path:
        """Write a file of the run, whole or not at all; a private one is for its owner only."""
        write_atomically(self.path / name, text, mode=PRIVATE if private else None)
        return self.path / name

    def check(self) -> None:
        """Raise RunDirError for a path that is not a directory, or one with other files; write nothing."""
        with self._usable():
            if self.path.exists():
                self._refuse_foreign()

    def make_logs(self) -> None:
        """Make the directory for logs of other processes of the run, before the trainer opens the run."""
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()
            self.logs_dir.mkdir(exist_ok=True)
            for probe in (self.path, self.logs_dir):  # before anything starts that would find out later
                tempfile.TemporaryFile(dir=probe).close()

    def check_kept(self) -> None:
        """Raise RunDirError if the directory that this process writes to was removed: further steps would be lost."""
        if self._lock is not None and not self.run_file.exists():
            raise RunDirError(
                f"output.dir={str(self.path)!r} was removed while the run wrote to it. Start the run again."
            )

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, NotADirectoryError):
            raise RunDirError(
                f"output.dir={str(self.path)!r} is a file, not a directory. Choose another output.dir."
            ) from None
        except OSError as error:
            raise RunDirError(f"output.dir={str(self.path)!r} cannot be used: {error.strerror}.") from error

    def _refuse_foreign(self) -> None:
        if self.run_file.exists():
            return
        ours = (".lock", self.logs_dir.name)
        foreign = sorted(
            item.name for item in self.path.iterdir() if item.name not in ours and ".tmp-" not in item.name
        )
        if foreign:
            raise RunDirError(
                f"output.dir={str(self.path)!r} is not a run of rl4llm: it has no run.json, but {', '.join(foreign)[:200]}. "
                "Choose a new or empty directory, or that of an earlier run."
            )

    def _identified(self, plan: _Claim) -> dict[str, Any] | None:
        """Set the identity of the run; return what to write, or None if it is already written."""
        identity = plan.identity
        self.resumed = self.run_file.exists()
        now = datetime.now(UTC)
        new = {
            "run_id": f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
            "created": now.isoformat("T", "seconds"),
            "rl4llm": rl4llm.__version__,
        }
        record = new | identity
        if self.resumed:
            stored = self._read_identity()
            # digests, under names such as that of a token
            record = redacted(stored) | {"contents": stored.get("contents", {})}
        self.run_id, self.created = record["run_id"], record["created"]
        was, contents = record["contents"], identity["contents"]
        changes = _differences(record["fingerprint"], identity["fingerprint"], plan.defaults)
        changes += tuple(
            f"{name}: {was[name]} -> {contents[name]}"
            for name in contents
            if was.get(name, contents[name]) != contents[name]
        )
        if changes and not plan.allow_changes:
            raise RunDirError(
                f"output.dir={str(self.path)!r} holds another run ({self.run_id}). What differs (was -> given):\n  "
                + "\n  ".join(changes)
                + "\nNext: choose another output.dir, or resume anyway with --force (allow_changes=True)."
            )
        self.changes = changes + _differences(
            record.get("settings", identity["settings"]), identity["settings"], plan.defaults
        )
        if self.resumed and {**record, **identity} == record:
            return None
        return {**record, **identity}

    def _read_identity(self) -> dict[str, Any]:
        try:
            identity = json.loads(self.run_file.read_text())
            str(identity["run_id"]), str(identity["created"]), dict(identity["fingerprint"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            problem = (
                f"is damaged ({type(error).__name__}: {error}). Restore it, or choose another output.dir."
            )
            raise RunDirError(f"{self.run_file} {problem}") from error
        return identity


def write_atomically(path: str | os.PathLike[str], data: bytes | str, *, mode: int | None = None) -> None:
    """Replace a file: readers see the old content or the new, also after a crash. Text is UTF-8.

    `mode` is its permission bits, whatever the umask; None leaves them to the umask.

    Raises RunDirError when it cannot be written; the old file is then as it was. Other kinds of files, such as
    /dev/null, are refused: the new file would replace them.
    """
    path, data = Path(path), data.encode() if isinstance(data, str) else data
    if path.exists() and not path.is_file():
        raise RunDirError(
            f"{path} cannot be written: it exists but is not a regular file. Next: choose another name."
        )
    beside = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with open(beside, "xb", opener=partial(os.open, mode=0o666 if mode is None else mode)) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_directory(path.parent)
    except OSError as error:
        raise RunDirError(
            f"{path} cannot be written: {error.strerror}.{space(path.parent, len(data), error)}"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # where nothing may be written, nothing may be removed
            beside.unlink()


def replace_directory(
    directory: Path, write: Callable[[Path], None], num_bytes: Callable[[], int] = int
) -> None:
    """Let `write` fill a new directory; it replaces `directory` when it is complete and on disk.

    Raises RunDirError when it cannot be written; `num_bytes` then returns the bytes that it needs, 0 if that is unknown.
    """
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
    except Exception as error:
        if not (isinstance(error, OSError) or is_full(error)):
            raise
        shutil.rmtree(scratch, ignore_errors=True)  # before the free space is measured
        if detail := space(directory.parent, num_bytes(), error):
            detail += " Next: free some space, then run the same command again."
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise RunDirError(f"{directory} cannot be written: {reason}.{detail}") from error
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


def is_full(error: BaseException, codes: Sequence[int] = FULL) -> bool:
    """Return whether an error means a full disk or quota, even if a library wrapped the system's error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in codes
    numbers = "|".join(map(str, codes))
    return (
        re.search(rf"os error ({numbers})\b|No space left|PytorchStreamWriter failed writing", str(error))
        is not None
    )


def space(directory: Path, needed: int, error: BaseException) -> str:
    """Return how many bytes a write needs, if known, and how many are free; "" where more space would not help."""
    if not is_full(error, NO_SPACE):
        return ""
    return f" Needed: {f'{needed:,}' if needed else 'unknown'} bytes; free: {shutil.disk_usage(directory).free:,} bytes."


def _differences(
    was: Mapping[str, Any], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return what two fingerprints disagree on, one line per dotted key; the old one may lack keys that have a default."""
    new = dict(dotted(given))
    old = {key: value for key, value in dotted(defaults) if key in new} | dict(dotted(was))
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key, NOTHING) != new.get(key, NOTHING))
    return tuple(f"{key}: {_shown(old, key)} -> {_shown(new, key)}" for key in keys)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "nothing"


def dotted(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of nested mappings with their values."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
