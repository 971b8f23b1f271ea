"""Dockerfiles that are built in a workspace, where neither podman nor docker works."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.workspaces import images, unpack
from rl4llm.extensions.workspaces.images import Image
from rl4llm.extensions.workspaces.workspace import Workspace

# what changes no file
IGNORED = {"CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "HEALTHCHECK", "STOPSIGNAL"}
BUILD_S = 3600.0
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")


@dataclass(slots=True)
class Build:
    """A Dockerfile as it is followed: what lies below, how programs begin, and what is still to do."""

    below: Image
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    steps: list[tuple[str, list[str], str, dict[str, str]]] = field(default_factory=list)


async def build(name: str, open_workspace: Callable[[Image], Awaitable[Workspace]]) -> Image:
    """Return the image of a directory with a Dockerfile, built unless the cache has it. Raises ConfigError."""
    context = Path(name).expanduser().resolve()
    plan = _planned(name, context)
    below = plan.below
    digest = hashlib.sha256(f"{images.tree_digest(context)} {below.root}".encode()).hexdigest()
    result = images.lookup(digest)
    if result is None:
        workspace = await open_workspace(below)
        try:
            for kind, words, cwd, variables in plan.steps:
                if kind == "RUN":
                    done = await workspace.run(words, wall_s=BUILD_S, cwd=cwd, env=variables)
                    if done.code != 0:
                        raise ConfigError(
                            f"workspace.image={name!r}: RUN {words[-1]}: {done.output[-500:].strip()}"
                        )
                else:
                    with tempfile.TemporaryFile() as archive:
                        _gather(name, context, words, cwd, archive)
                        await workspace.unpack(archive.fileno())
            with tempfile.TemporaryFile() as archive:
                await workspace.pack(archive.fileno())
                archive.seek(0)
                result = images.unpacked(name, digest, [archive], shell=not below.binds)
        finally:
            await workspace.close()
    return replace(below, root=result, environment=plan.environment, cwd=plan.cwd)


def is_local(name: str) -> bool:
    """Return whether a Dockerfile begins from the host or a path, which neither podman nor docker knows."""
    context = Path(name).expanduser()
    steps = _instructions((context / "Dockerfile").read_text())
    source = next((rest.split()[0] for word, rest in steps if word == "FROM" and rest), "")
    return source == "host" or (source != "" and (context / source).exists())


def _planned(name: str, context: Path) -> Build:
    plan: Build | None = None
    if (context / ".dockerignore").exists():
        raise ConfigError(f"workspace.image={name!r}: .dockerignore needs podman or docker.")
    arguments: dict[str, str] = {}
    for word, rest in _instructions((context / "Dockerfile").read_text()):
        if word == "ARG":
            _declare(plan, rest, arguments)
        elif word == "FROM" and plan is None:
            source = _expand(rest.split()[0], arguments)
            below = images.empty() if source == "scratch" else images.prepare(_local(name, context, source))
            path = {"PATH": images.ENVIRONMENT["PATH"]}
            plan = Build(below, {**path, **below.environment}, {}, below.cwd)
        elif plan is None or not _follow(plan, word, rest):
            raise ConfigError(f"workspace.image={name!r}: {word} {rest[:60]} needs podman or docker.")
    if plan is None:
        raise ConfigError(f"workspace.image={name!r}: the Dockerfile has no FROM.")
    return plan


def _declare(plan: Build | None, rest: str, before: dict[str, str]) -> None:
    """Add the arguments of ARG; in a plan, those without a value have that of `before`, which come before FROM."""
    scope, environment = (plan.arguments, plan.environment) if plan else (before, {})
    for key, equals, value in (part.partition("=") for part in shlex.split(rest)):
        if equals:
            scope[key] = _expand(value, {**scope, **environment})
        elif key in before:
            scope[key] = before[key]


def _follow(plan: Build, word: str, rest: str) -> bool:
    """Add an instruction to a plan; return whether it is known."""
    variables = {**plan.arguments, **plan.environment}
    flags = rest.startswith("--")
    if word == "ENV":
        pairs = [part.partition("=") for part in shlex.split(rest)]
        if "=" not in shlex.split(rest)[0]:
            pairs = [(rest.split(None, 1)[0], "=", rest.split(None, 1)[1])]
        plan.environment |= {key: _expand(value, variables) for key, _, value in pairs}
    elif word == "WORKDIR":
        plan.cwd = os.path.normpath(os.path.join(plan.cwd, _expand(rest, variables)))
        plan.steps.append(("WORKDIR", [], plan.cwd, variables))
    elif word == "RUN" and not flags:
        words = json.loads(rest) if rest.startswith("[") else ["/bin/sh", "-c", rest]
        plan.steps.append(("RUN", words, plan.cwd, variables))
    elif word in ("COPY", "ADD") and not flags and "://" not in rest:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        if word == "ADD" and any(".tar" in source or source.endswith(".tgz") for source in words[:-1]):
            return False
        plan.steps.append(("COPY", [_expand(part, variables) for part in words], plan.cwd, variables))
    else:
        return word in IGNORED
    return True


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\s*\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()


def _gather(name: str, context: Path, words: list[str], cwd: str, archive: io.BufferedRandom) -> None:
    """Write an archive of the files that a COPY names, at their places in the image."""
    *patterns, target = words or [""]  # nothing but the directory
    sources = [source for pattern in patterns for source in sorted(context.glob(pattern.strip("/") or "."))]
    place = os.path.join(cwd, target)
    into = target.endswith("/") or target == "." or len(sources) > 1
    alone = sources[0].name if len(sources) == 1 and sources[0].is_file() else "/"
    with tarfile.open(fileobj=archive, mode="w", pax_headers={unpack.COPIED: alone}) as tar:
        folder = tarfile.TarInfo(cwd)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        for source in sources:
            if not source.resolve().is_relative_to(context):
                raise ConfigError(f"workspace.image={name!r}: COPY of {source} leads out of the directory.")
            tar.add(source, os.path.join(place, source.name) if into and not source.is_dir() else place)
    if words and not sources:
        raise ConfigError(f"workspace.image={name!r}: COPY {' '.join(words)}: no file was found.")
    archive.seek(0)


def _local(name: str, context: Path, source: str) -> str:
    for path in (context / source, Path(source).expanduser()):
        if path.exists():
            return str(path)
    if source == "host":
        return source
    raise ConfigError(
        f"workspace.image={name!r}: FROM {source} needs podman or docker. Accepted: scratch, host, a path."
    )


def _expand(text: str, variables: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda match: variables.get(match[1] or match[3], match[2] or ""), text)
