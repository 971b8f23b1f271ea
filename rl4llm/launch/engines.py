"""``rl4llm launch CONFIG --on ENGINE``: write the files that start a run elsewhere, and submit them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl4llm.config import Config, load_config, to_yaml
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.launch import kubernetes, modal, ray, skypilot, slurm, ssh
from rl4llm.launch.job import Job
from rl4llm.launch.roles import roles

CONFIG = "config.yaml"


@dataclass(frozen=True, slots=True)
class Engine:
    """What starts processes on machines.

    Args:
        render: the files of a job, by name.
        submit: the command that submits them, in their directory.
        config: where the configuration is for the processes; "" is beside the files, which all machines see.
        shared: the option that says where all machines share files, when that is not the directory of the command.
        ready: raises ConfigError where the command could not submit anything, before files are written for it.
    """

    render: Callable[[Job, str], Mapping[str, str]]
    submit: Callable[[Job], Sequence[str]]
    config: str = ""
    shared: str | None = None
    ready: Callable[[], None] = lambda: None


def _without_config(render: Callable[[Job], Mapping[str, str]]) -> Callable[[Job, str], Mapping[str, str]]:
    return lambda job, config: render(job)


ENGINES: Mapping[str, Engine] = {
    "ssh": Engine(_without_config(ssh.render), ssh.submit),
    "slurm": Engine(_without_config(slurm.render), slurm.submit),
    "skypilot": Engine(_without_config(skypilot.render), skypilot.submit, config=CONFIG, shared="shared"),
    "ray": Engine(_without_config(ray.render), ray.submit),
    "modal": Engine(modal.render, modal.submit, config=modal.CONFIG, ready=modal.ready),
    "kubernetes": Engine(kubernetes.render, kubernetes.submit, config=kubernetes.CONFIG, shared="shared"),
}


def launch_on(
    name: str,
    config: str,
    overrides: Sequence[str],
    *,
    options: Sequence[str],
    out: Path | None,
    submit: bool,
    say: Callable[[str], None],
) -> int:
    """Write a job's files, and submit them if asked to; the exit code. Raises ConfigError before anything is written."""
    directory, files, words, job = prepared(name, config, overrides, options=options, out=out)
    missing = [key for key in job.secrets if submit and not os.environ.get(key)]
    if missing and name != "kubernetes":
        raise ConfigError(f"{missing[0]} is not set. Next: export {missing[0]}=$(openssl rand -hex 32)")
    if submit:
        ENGINES[name].ready()
    if submit and shutil.which(words[0]) is None:
        raise ConfigError(f"There is no {words[0]} here to submit with. Next: leave --submit out, and take the files there.")
    _write(directory, files)
    say(f"Wrote {', '.join(str(directory / file) for file in files)}")
    if job.secrets:
        say(f"Keys that must be set where it runs, and are in no file: {', '.join(job.secrets)}")
    if not submit:
        say(f"Submit with --submit, or:\n  cd {shlex.quote(str(directory))} && {shlex.join(words)}")
        return 0
    return subprocess.run(words, cwd=directory, check=False).returncode


def prepared(
    name: str, config: str, overrides: Sequence[str], *, options: Sequence[str], out: Path | None
) -> tuple[Path, dict[str, str], list[str], Job]:
    """Where a job's files go, their texts by name, the command that submits them there, and the job.

    Args:
        options: `KEY=VALUE` for the engine.
        out: a directory for the files; None is that of the run's output with the engine's name behind it.
    """
    if name not in ENGINES:
        raise ConfigError(unknown("--on", name, ("local", *ENGINES)))
    chosen, engine = load_config(config, overrides), ENGINES[name]
    directory = out or Path(f"{chosen.output.dir.rstrip('/')}-{name}")
    job = _job(chosen, engine, directory, dict(map(_option, options)))
    text = to_yaml(chosen)
    files = {**engine.render(job, text), **({CONFIG: text} if engine.config in ("", CONFIG) else {})}
    return directory, files, list(engine.submit(job)), job


def _job(config: Config, engine: Engine, directory: Path, options: dict[str, str]) -> Job:
    path = engine.config or str((directory / CONFIG).resolve())
    name = re.sub(r"[^a-z0-9]+", "-", Path(config.output.dir).name.lower()).strip("-")[:40].strip("-") or "rl4llm"
    name = name if name[0].isalpha() else f"run-{name}"
    here = Path.cwd()
    if engine.shared:
        here = Path(options.get(engine.shared, "/shared"))
        if not Path(config.output.dir).is_absolute() or not Path(config.output.dir).is_relative_to(here):
            raise ConfigError(
                f"output.dir={config.output.dir} is not accepted: all machines have to see it, and what they share is "
                f"{here}. Next: output.dir={here}/{Path(config.output.dir).name}, or --option {engine.shared}=PATH."
            )
    return Job(name, roles(config, ("rl4llm", "launch", path)), here, options)


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or any(not letter.isprintable() for letter in value):
        raise ConfigError(f"--option {text!r} is not accepted: KEY=VALUE, in one line.")
    return name, value


def _write(directory: Path, files: Mapping[str, str]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error}. Next: --out DIRECTORY.") from None
