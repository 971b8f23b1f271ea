"""Manifests list the files of a directory with their hashes, so that a reader can detect damage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from rl4llm.runs.run_dir import sync_directory, sync_file

NAME = "manifest.json"
FORMAT = 1
CHUNK = 1 << 20


def seal(directory: Path, *, known_hashes: Mapping[str, str] | None = None, **facts: Any) -> None:
    """Write `manifest.json` with the size and xxh3_64 of every file below `directory`, and force all of it to disk.

    `known_hashes` are those of files that were hashed while they were written, and need not be read again.
    """
    hashes = known_hashes or {}
    paths = (path for path in directory.rglob("*") if path.is_file() and path != directory / NAME)
    names = {file.relative_to(directory).as_posix(): file for file in sorted(paths)}
    files = {
        name: {"size": file.stat().st_size, "xxh3_64": hashes.get(name) or _hash(file)}
        for name, file in names.items()
    }
    (directory / NAME).write_text(json.dumps({"format": FORMAT, **facts, "files": files}, indent=1))
    for path in (directory, *directory.rglob("*")):
        if path.is_dir():
            sync_directory(path)
        else:
            sync_file(path)


def damage(directory: Path, **facts: Any) -> str | None:
    """Return what is wrong with a sealed directory, or None. `facts` must equal those of `seal`."""
    try:
        manifest = json.loads((directory / NAME).read_text())
        for name, value in {"format": FORMAT, **facts}.items():
            if manifest[name] != value:
                return f"{NAME} has {name} {manifest[name]!r}, expected {value!r}"
        problems = (_compare(directory, name, entry) for name, entry in manifest["files"].items())
        return next((problem for problem in problems if problem), None)
    except FileNotFoundError:
        return f"{NAME} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{NAME} is damaged ({type(error).__name__}: {error})"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def same(one: Path, other: Path) -> bool:
    """Return whether two sealed directories have equal manifests."""
    try:
        return json.loads((one / NAME).read_text()) == json.loads((other / NAME).read_text())
    except (OSError, ValueError):
        return False


def _compare(directory: Path, name: str, entry: dict[str, Any]) -> str | None:
    file = directory / name
    if not file.is_file():
        return f"{name} is missing"
    size = file.stat().st_size
    if size != entry["size"]:
        return f"{name} has {size:,} bytes instead of {entry['size']:,}"
    return None if _hash(file) == entry["xxh3_64"] else f"{name} is damaged (its hash differs)"


def _hash(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with open(file, "rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
