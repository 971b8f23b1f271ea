"""``rl4llm launch CONFIG --on LAUNCHER``: write the files that start a run on other machines, and submit them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.config import Config, load_config
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.extensions.launch import modal, slurm
from rl4llm.extensions.launch.roles import ClusterJob, roles

LAUNCHERS: Mapping[str, Any] = {"slurm": slurm, "modal": modal}
"""Modules with `render`, which returns the files of a job by name, `SUBMIT`, the command that submits them, and `CONFIG`,
the path of the configuration for the processes, "" for next to the files, on a shared file system."""


def launch_on(
    name: str,
    config: str,
    overrides: Sequence[str],
    *,
    options: Mapping[str, str],
    out: Path | None,
    submit: bool,
    say: Callable[[str], None],
) -> int:
    """Write a job's files, submit them if asked to, and return the exit code."""
    directory, files, words, job = prepared(name, config, overrides, options=options, out=out)
    missing = [key for key in job.secrets if submit and not os.environ.get(key)]
    if missing:  # the job would wait in the queue first
        raise ConfigError(f"{missing[0]} is not set. Next: export {missing[0]}=$(openssl rand -hex 32)")
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (directory / file).write_text(text)
    say(f"Wrote {', '.join(str(directory / file) for file in files)}")
    if job.secrets:
        say(f"No file contains these environment variables, which must be set: {', '.join(job.secrets)}")
    if not submit:
        say(f"Submit with --submit, or:\n  cd {shlex.quote(str(directory))} && {shlex.join(words)}")
        return 0
    return subprocess.run(words, cwd=directory, check=False).returncode


def prepared(
    name: str, config: str, overrides: Sequence[str], *, options: Mapping[str, str], out: Path | None
) -> tuple[Path, dict[str, str], list[str], ClusterJob]:
    """Return the directory of a job's files, their texts by name, the command that submits them there, and the job.

    The directory is by default output.dir followed by "-" and the launcher's name.
    """
    if name not in LAUNCHERS:
        raise ConfigError(unknown("--on", name, ("local", *LAUNCHERS)))
    chosen, launcher = load_config(config, overrides), LAUNCHERS[name]
    directory = out or Path(f"{chosen.output.dir.rstrip('/')}-{name}")
    path = launcher.CONFIG or str((directory / "config.yaml").resolve())
    job = ClusterJob(
        _name(chosen),
        roles(chosen, ("rl4llm", "launch", path)),
        Path.cwd(),
        options,
        chosen.to_yaml(elsewhere=True),
    )
    return directory, {**launcher.render(job), "config.yaml": job.config}, list(launcher.SUBMIT), job


def _name(config: Config) -> str:
    """Return the name of a job, from the last part of output.dir."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(config.output.dir).name.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}" if name else "rl4llm"
