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

    An entry is the name of an installed package or, with a slash, a directory. Raises ConfigError for others.
    """
    found: dict[str, Mounted] = {}
    modules: list[str] = []
    seen: set[str] = set()
    for entry in entries:
        if os.sep in entry:
            path = os.path.abspath(entry)
            if not os.path.isdir(path):
                raise ConfigError(f"sandbox.packages: {entry!r} is not a directory.")
            found[path] = Mounted(path, path)
            continue
        modules += _modules(entry)
        for name in _with_dependencies(entry, entry, seen):
            for part in _top_level(name):
                found[str(part)] = Mounted(str(part), f"{INSIDE}/{part.name}")
    return tuple(found.values()), tuple(modules)


def import_paths(mounts: Sequence[Mounted], own_files: bool) -> list[str]:
    """Return the entries of `sys.path`; a level without separate files imports what is mounted from where it is."""
    places = {mount: INSIDE if own_files else os.path.dirname(mount.host) for mount in mounts}
    return list(
        dict.fromkeys(mount.host if mount.inside == mount.host else places[mount] for mount in mounts)
    )


def _with_dependencies(name: str, asked: str, seen: set[str]) -> Iterable[str]:
    from packaging.requirements import Requirement  # noqa: PLC0415 - only where packages are named

    key = name.lower().replace("_", "-").replace(".", "-")
    if key in seen:
        return
    seen.add(key)
    requires = _distribution(name, asked).requires or ()
    yield name
    for line in requires:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from _with_dependencies(requirement.name, asked, seen)


def _distribution(name: str, asked: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        needed = "" if name == asked else f", which {asked} needs,"
        raise ConfigError(
            f"sandbox.packages: {name!r}{needed} is not installed in this environment. Accepted: names of installed "
            f"packages, such as numpy, and directories. Next: pip install {name}, or remove {asked!r}."
        ) from None


def _top_level(name: str) -> list[Path]:
    """Return the files and directories of an installed package directly below its site directory."""
    distribution = _distribution(name, name)
    tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
    kept = [top for top in sorted(tops) if not top.endswith((".dist-info", ".egg-info", ".pth"))]
    return [Path(str(distribution.locate_file(top))).resolve() for top in kept]


def _modules(name: str) -> list[str]:
    found = [path.name.removesuffix(".py") for path in _top_level(name) if path.suffix in ("", ".py")]
    return [module for module in found if module == name.lower().replace("-", "_")] or found or [name]
