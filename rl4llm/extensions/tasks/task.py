"""What a task directory says, in the form of Harbor (task.toml) or of Terminal-Bench 1 (task.yaml)."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl4llm.core.errors import DataError

MARKS = ("task.toml", "task.yaml")
"""The files that make a directory a task."""

REFERENCE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
SECTIONS = ("agent", "verifier", "solution", "environment")
KEYS = (
    "version", "schema_version", "source", "metadata", "task", "artifacts", *SECTIONS, "timeout_sec", "env", "docker_image",
    "workdir", "memory_mb", "memory", "storage_mb", "storage", "cpus", "build_timeout_sec", "allow_internet", "network_mode",
    "allowed_hosts",
)  # fmt: skip
"""The keys that are read, or that only describe; network, memory and disk are the run's to give."""

SERVICE = ("build", "image", "container_name", "command", "volumes")
"""What a service of Terminal-Bench always has. Its volumes are logs, and its command waits."""

PLAIN = {"os": "linux", "environment_mode": "shared", "user": "root", "parser_name": "pytest"}
"""Values of other keys that say what happens in any case."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script of a task: paths to bind, words, variables, seconds, and its text with that of the programs beside it."""

    files: Mapping[str, Path]
    words: Sequence[str]
    env: Mapping[str, str]
    wall_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Task:
    """A task: `image` is a name or a directory with a Dockerfile, None where the run decides."""

    instruction: str
    image: str | None
    test: Script
    solution: Script | None
    workdir: str | None
    env: Mapping[str, str]


def read_task(directory: Path) -> Task:
    """Read a task directory; raises DataError, with its file, for what is missing, unreadable or cannot be obeyed."""
    file = next((directory / name for name in MARKS if (directory / name).is_file()), directory / MARKS[0])
    try:
        return _harbor(file) if file.suffix == ".toml" else _terminal_bench(file)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    except (OSError, LookupError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise DataError(f"{file}: the task cannot be read: {' '.join(str(error).split())}.") from error


def names_task(row: Mapping[str, Any]) -> bool:
    """Return whether the column `task` of a row is a task directory; it may be a kind or a sentence in other datasets."""
    task = row.get("task")
    return bool(task) and any(os.path.isfile(os.path.join(str(task), mark)) for mark in MARKS)


def _harbor(file: Path) -> Task:
    config, directory = tomllib.loads(file.read_text(encoding="utf-8")), file.parent
    for section, table in {"": config, **{f"{name}.": config.get(name, {}) for name in SECTIONS}}.items():
        _refuse(section, table, KEYS)
    instruction = (directory / "instruction.md").read_text(encoding="utf-8")
    return _task(directory, config, instruction, "environment", "tests/test.sh", "solution/solve.sh")


def _terminal_bench(file: Path) -> Task:
    stored = yaml.safe_load(file.read_text(encoding="utf-8"))
    _refuse("", stored, [key for key in stored if key not in ("parser_name", "run_tests_in_same_shell")])
    config = {
        "agent": {"timeout_sec": stored.get("max_agent_timeout_sec", 360)},
        "verifier": {"timeout_sec": stored.get("max_test_timeout_sec", 60), "env": {"TEST_DIR": "/tests"}},
    }
    return _task(file.parent, config, stored["instruction"], "", "run-tests.sh", "solution.sh")


def _task(
    directory: Path, config: Mapping[str, Any], instruction: str, context: str, test: str, solution: str
) -> Task:
    if not instruction.strip():
        raise DataError("the task has no instruction.")
    environment, tests = config.get("environment", {}), config.get("verifier", {})
    image = environment.get("docker_image")
    dockerfile = _image(directory / context, files=bool(context) and image is None)
    visible = environment.get("env", {})
    if REFERENCE.search(str(visible)):
        raise DataError(
            "environment.env would show this machine's variables to the policy. Move ${NAME} to verifier.env."
        )
    hidden = {"/tests": directory / "tests"} if (directory / "tests").is_dir() else {}
    solve = None
    if (directory / solution).is_file():
        limits = config.get("agent", {}) | config.get("solution", {})
        solve = _script(directory / solution, f"/{solution}", {}, limits)
    return Task(
        instruction.strip(),
        dockerfile or image,
        _script(directory / test, f"/{test}", hidden, tests),
        solve,
        environment.get("workdir"),
        _variables(visible),
    )


def _script(file: Path, place: str, files: Mapping[str, Path], options: Mapping[str, Any]) -> Script:
    """Return how a script runs, whether or not it is executable: with the words behind its ``#!``, else with sh."""
    text = file.read_text(encoding="utf-8", errors="replace")
    words = text.partition("\n")[0][2:].split() if text.startswith("#!") else ["sh"]
    folder = os.path.dirname(place)
    bound = {place: file} if folder == "/" else {folder: file.parent}  # with the files beside it
    texts = [text, *(path.read_text("utf-8", "replace") for path in files.get(folder, file).rglob("*.py"))]
    env, wall_s = _variables(options.get("env", {})), float(options.get("timeout_sec") or 600)
    return Script({**files, **bound}, (*words, place), env, wall_s, "\n".join(texts))


def _refuse(section: str, table: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise DataError for a key that would change the outcome if it were obeyed."""
    for key, value in table.items():
        if key not in keys and value and value != PLAIN.get(key):
            raise DataError(f"{section}{key}={value!r:.60} is not supported. Remove the key, or the task.")


def _image(context: Path, *, files: bool) -> str | None:
    """Return the directory of a Dockerfile, None without one; `files` there without one would be in no image."""
    compose = context / "docker-compose.yaml"
    if compose.is_file():
        services = yaml.safe_load(compose.read_text(encoding="utf-8"))["services"]
        if len(services) != 1:
            raise DataError(f"{compose.name} starts {', '.join(services)}, but a workspace is one machine.")
        (service,) = services.values()
        variables = [item for item in service.get("environment") or () if not item.startswith("TEST_DIR")]
        _refuse(f"{compose.name}: ", {**service, "environment": variables}, SERVICE)
        build = service.get("build") or "."
        context = context / (build if isinstance(build, str) else build.get("context", "."))
    if (context / "Dockerfile").is_file():
        return str(context.resolve())
    if files and context.is_dir() and any(context.iterdir()):
        raise DataError(f"{context.name} has files, but no Dockerfile that copies them into the image.")
    return None


def _variables(table: Mapping[str, Any]) -> dict[str, str]:
    """Return variables for a script of a task, where ${NAME} and ${NAME:-default} stand for those of this machine."""

    def value(match: re.Match[str]) -> str:
        if (text := os.environ.get(match[1], match[2])) is None:
            raise DataError(f"the variable {match[1]} is not set. Set it where the run starts.")
        return text

    return {name: REFERENCE.sub(value, str(text)) for name, text in table.items()}
