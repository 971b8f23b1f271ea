"""Dockerfiles that begin from the host or a path, and only copy and run: a workspace builds them, without podman."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.workspaces import images
from rl4llm.extensions.workspaces.images import Image
from rl4llm.extensions.workspaces.mounted import Mounted

BUILD_S = 3600.0
CONTEXT = "/.context"
WITHOUT_FILES = ("CMD", "ENTRYPOINT", "LABEL", "EXPOSE")
EXPANDED = ("ENV", "WORKDIR", "COPY")
VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)


@dataclass(slots=True)
class Build:
    """A Dockerfile as it is followed: the image with its variables and directory so far, and the programs that change it."""

    image: Image
    steps: list[tuple[list[str], str, dict[str, str]]]


async def build(name: str, open_workspace: Callable[[Image], Awaitable[Mounted]]) -> Image:
    """Return the image of a directory with a Dockerfile, built unless the cache has it. Raises ConfigError."""
    context = Path(name).expanduser().resolve()
    plan = _planned(name, context)
    below = plan.image.root
    digest = hashlib.sha256(f"{images.tree_digest(context)} {below}".encode()).hexdigest()
    if (root := images.lookup(digest)) is None:
        workspace = await open_workspace(plan.image)
        try:
            for words, cwd, variables in plan.steps:
                files = {CONTEXT: context}
                result = await workspace.run(words, wall_s=BUILD_S, cwd=cwd, env=variables, files=files)
                if result.code != 0:
                    reason = f"{' '.join(words)[-200:]}: {result.output[-500:].strip()}"
                    raise ConfigError(f"workspace.image={name!r}: {reason}")
            with tempfile.TemporaryFile() as archive:
                await workspace.pack(archive.fileno())
                archive.seek(0)
                root = images.unpacked(name, digest, [archive], shell=not plan.image.binds)
        finally:
            await workspace.close()
    return replace(plan.image, root=root)


def _planned(name: str, context: Path) -> Build:
    (word, source), *rest = _instructions((context / "Dockerfile").read_text())
    if word != "FROM" or (context / ".dockerignore").exists():
        rest = [(word if word != "FROM" else ".dockerignore", "")]
    beside = context / source
    below = images.prepare(str(beside) if source != "host" and beside.exists() else source)
    path = {"PATH": images.ENVIRONMENT["PATH"]}
    plan = Build(replace(below, environment={**path, **below.environment}), [])
    for word, text in rest:
        if not _follow(plan, context, word, text):
            raise ConfigError(f"workspace.image={name!r}: {word} {text[:60]} needs workspace.engine=podman.")
    return plan


def _follow(plan: Build, context: Path, word: str, text: str) -> bool:
    """Add an instruction to a plan; return whether it is known."""
    image = plan.image
    script, flags = "", text.startswith("--")
    if word in EXPANDED and "$" in text and re.search(r"[$'\\]", VARIABLE.sub("", text)):
        return False  # an operator on a variable, or a `$` that is quoted
    if word == "ENV" and "=" in text.partition(" ")[0]:
        values = dict(part.split("=", 1) for part in _expanded(shlex.split(text), image.environment))
        plan.image = replace(image, environment={**image.environment, **values})
    elif word == "WORKDIR":
        place = " ".join(_expanded(shlex.split(text), image.environment))
        plan.image = replace(image, cwd=os.path.normpath(os.path.join(image.cwd, place)))
        script = f"mkdir -p {shlex.quote(plan.image.cwd)}"
    elif word == "RUN" and not flags:
        script = shlex.join(json.loads(text)) if text.startswith("[") else text
    elif word == "COPY" and not flags:
        words = json.loads(text) if text.startswith("[") else shlex.split(text)
        script = _copy(context, _expanded(words, image.environment))
    else:
        return word in WITHOUT_FILES
    if script:
        plan.steps.append((["/bin/sh", "-c", script], image.cwd, dict(image.environment)))
    return True


def _expanded(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """Return words with the values of variables; those that are not set are empty, as in docker."""
    return [VARIABLE.sub(lambda match: environment.get(match[1] or match[2], ""), word) for word in words]


def _copy(context: Path, words: list[str]) -> str:
    """Return the script of a COPY: a file of the context comes into a directory, the files of a directory too."""
    *patterns, target = words
    paths = [path for pattern in patterns for path in sorted(context.glob(pattern.strip("/") or "."))]
    parts = [str(path.relative_to(context)) for path in paths] or patterns  # cp names those that are missing
    many = len(parts) > 1 or target.endswith(("/", "."))
    commands = [f"mkdir -p {shlex.quote(target if many else os.path.dirname(target) or '.')}"]
    for part in parts:
        folder = (context / part).is_dir()
        source, place = f"{CONTEXT}/{part}/." if folder else f"{CONTEXT}/{part}", shlex.quote(target)
        commands += [f"mkdir -p {place}"] if folder else []
        commands.append(f"cp -r {shlex.quote(source)} {place}")
    return " && ".join(commands)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\s*\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()
