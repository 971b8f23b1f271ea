"""Installed packages that programs may import: their files, their shared libraries and the packages that they need."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rl4llm.core.errors import ConfigError

INSIDE = "/packages"


@dataclass(frozen=True, slots=True)
class Mounted:
    """A file or directory of the host that is read-only at `inside` in a sandbox."""

    host: str
    inside: str


def mounted(entries: Iterable[str]) -> tuple[tuple[Mounted, ...], tuple[str, ...]]:
    """Return what `sandbox.packages` mounts, and the modules that must be importable then.

    An entry is the name of an installed package or, with a slash, a directory. Raises PackageNotFoundError or ConfigError.
    """
    mounts: dict[str, Mounted] = {}
    modules: list[str] = []
    seen: set[str] = set()
    for entry in entries:
        path = os.path.abspath(entry)
        if os.sep not in entry:
            modules += _modules(entry)
            parts = [part for name in _with_dependencies(entry, seen) for part in _top_level(name)]
            mounts |= {str(part): Mounted(str(part), f"{INSIDE}/{part.name}") for part in parts}
        elif os.path.isdir(path):
            mounts[path] = Mounted(path, path)
        else:
            raise ConfigError(f"sandbox.packages: {entry!r} is not a directory.")
    return tuple(mounts.values()), tuple(modules)


def import_paths(mounts: Sequence[Mounted], own_files: bool) -> list[str]:
    """Return the entries of `sys.path`; a level without separate files imports what is mounted from where it is."""
    places = {mount: INSIDE if own_files else os.path.dirname(mount.host) for mount in mounts}
    places |= {mount: mount.host for mount in mounts if mount.inside == mount.host}
    return list(dict.fromkeys(places.values()))


def _with_dependencies(name: str, seen: set[str]) -> Iterable[str]:
    from packaging.requirements import Requirement  # noqa: PLC0415 - only where packages are named

    key = name.lower().replace("_", "-").replace(".", "-")
    if key in seen:
        return
    seen.add(key)
    yield name
    for requirement in map(Requirement, metadata.distribution(name).requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from _with_dependencies(requirement.name, seen)


def _top_level(name: str) -> list[Path]:
    """Return the files and directories of an installed package directly below its site directory."""
    distribution = metadata.distribution(name)
    tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
    parts = [top for top in sorted(tops) if not top.endswith((".dist-info", ".egg-info", ".pth"))]
    return [Path(str(distribution.locate_file(part))).resolve() for part in parts]


def _modules(name: str) -> list[str]:
    modules = [path.name.removesuffix(".py") for path in _top_level(name) if path.suffix in ("", ".py")]
    return [module for module in modules if module == name.lower().replace("-", "_")] or modules or [name]
