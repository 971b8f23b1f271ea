"""The app that Modal runs for ``rl4llm launch --on modal``: the only file that imports `modal`.

    actor, a Function                     workers, a Server each
      rl4llm launch --as trainer            rl4llm launch --as server
      commits weights/v000012   -- volume --   reloads, loads, proves version 12

A server that is asked to load a version before it sees it refuses, and is asked again until it does
(`inference.visible_within_s`).

Each server has a fixed address, also when its container is replaced, so that weights reach every one of them. It
requires RL4LLM_SERVER_KEY. The trainer's container may be replaced too, and runs for at most 24 hours: the run then
resumes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modal
from packaging.requirements import Requirement

from rl4llm.commands.output import say
from rl4llm.config import Config, load_config
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.extensions.launch.modal import CONFIG, SHARED
from rl4llm.extensions.launch.roles import NUMBER, PORTS, SGLANG, Role, hosts_variable, roles
from rl4llm.runtime.supervise import start

VOLUME = "RL4LLM_VOLUME"
SOURCES = "/root"  # where Modal puts Python sources; only processes that it starts search there
CACHES = ["**/__pycache__"]
CUDA = "nvidia/cuda:12.9.1-devel-ubuntu24.04"  # SGLang compiles kernels when it starts
SERVERS = "/opt/sglang"
DAY_S = 24 * 3600  # Modal's limit for a call
BOOTS_WITHIN_S = 1800
RETRIES = 10
STOPPED = 75
NAMED = re.compile(r"[A-Za-z_]\w*(\.\w+)*:\w+")  # package.module:Name
SHOWS_WITHIN_S = 600.0  # to commit and reload a version of many GB
SYNC_S = 1.0  # between two commits or reloads
GRACE_S = 25.0  # a container that is shut down has 30 s


@dataclass(frozen=True, slots=True)
class ModalRun:
    """What `modal run` finds in the generated file; running the app starts the servers."""

    app: modal.App
    trainer: modal.Function[..., Any, Any]
    servers: Sequence[modal.Server]

    def start(self) -> None:
        """Start the trainer and wait for it; with ``modal run --detach`` it keeps running when this process ends."""
        call = self.trainer.spawn([server.get_url() for server in self.servers])
        sys.stdout.write(
            f"Training: {call.object_id}. If detached, it keeps running after Ctrl-C: modal app logs {self.app.app_id}\n"
        )
        sys.stdout.flush()
        if code := call.get():
            sys.exit(code)


def build(path: Path, name: str, options: Mapping[str, str]) -> ModalRun:
    """Return the app of a configuration, not started, whose file is copied into every container."""
    config = load_config(path)
    trainer, *served = roles(config, ("rl4llm", "launch", CONFIG))
    disk = options.get("volume", "rl4llm")
    shared: dict[str, Any] = {
        "image": _image(config, path, options, servers=bool(served)),
        "volumes": {SHARED: modal.Volume.from_name(disk, create_if_missing=True)},
        "env": {VOLUME: disk},
        "secrets": _secrets(trainer, options),
    }
    app = modal.App(name, include_source=False)
    alone: dict[str, Any] = {"max_containers": 1, "single_use_containers": True}
    train = app.function(
        name="trainer", gpu=_gpu(trainer), timeout=DAY_S, retries=RETRIES, **alone, **shared
    )(actor)
    servers = [_server(app, role, number, shared) for role in served for number in range(role.count)]
    return ModalRun(app, train, servers)


def actor(server_urls: list[str]) -> int:
    """Train or resume the run in a container; return the exit code."""
    environ = {NUMBER: "0", **_environ(server_urls)}
    command = _command("trainer", _fitted(load_config(CONFIG)))
    code = _synced(_volume().commit, command, environ, Path(SHARED))
    if code == STOPPED:
        # Modal retries the call, which resumes the run
        raise RuntimeError("The run was stopped; it resumes from its last checkpoint.")
    return code


def worker() -> int:
    """Serve in a container until the server ends; return the exit code."""
    config = load_config(CONFIG)
    local = Path(SHARED) / config.model.path
    command = _command("server", [f"model.path={local}"] if local.is_dir() else [])
    names = [f"server-{number}" for number in range(config.launch.servers)]
    # A volume cannot be reloaded while a working directory is on it.
    return _synced(_volume().reload, command, _environ(names), Path("/"))


def _synced(
    step: Callable[[], None], command: Sequence[str], environ: Mapping[str, str], directory: Path
) -> int:
    """Run a command to its end and commit or reload the volume meanwhile and after it; return its exit code."""
    process, reason = start(command, environ, GRACE_S, directory=directory), ""
    try:
        while process.poll() is None:
            time.sleep(SYNC_S)
            reason = _tried(step, reason)
        return process.returncode
    finally:
        process.terminate()
        process.wait()
        _tried(step, reason)


def _tried(step: Callable[[], None], before: str) -> str:
    """Return why a step failed, "" if it did not; print the reason unless it is the same as before."""
    try:
        step()
    except (RuntimeError, modal.exception.Error) as error:
        if str(error) != before:
            say(f"The volume is not ready, retrying: {error}")
        return str(error)
    return ""


class Worker:
    """A container that runs an inference server."""

    @modal.enter()
    def start(self) -> None:
        """Start the server; Modal routes traffic to it once it listens, and replaces a container whose server ended."""
        threading.Thread(target=_work, daemon=True).start()


def _work() -> None:
    """Run the server, and end this container when it ends."""
    code = 1
    try:
        code = worker() or 1
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def _raised_as(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except modal.exception.Error as error:
        raise kind(f"Modal: {error}") from error


class Programs:
    """A sandbox of Modal, without network, secrets or volume, which runs and judges programs of the policy.

    bubblewrap does not work in Modal's containers: gVisor, which runs them, has no /proc/sys/user/max_user_namespaces
    (google/gvisor#11210).
    """

    def __init__(self) -> None:
        image = modal.Image.debian_slim(python_version=_python()).add_local_python_source(
            "rl4llm", ignore=CACHES
        )
        walls: dict[str, Any] = {"block_network": True, "timeout": DAY_S, "cpu": 1.0, "memory": 2048}
        with _raised_as(OSError), contextlib.ExitStack() as undo:
            app = modal.App.lookup("rl4llm-programs", create_if_missing=True)
            self._sandbox = modal.Sandbox.create(app=app, image=image, **walls)
            undo.callback(self.close)  # otherwise it would run, and cost money, for a day
            self._process = self._sandbox.exec(
                "python", "-m", "rl4llm.extensions.sandbox.serve", workdir=SOURCES
            )
            undo.pop_all()
        self.output = self._process.stdout

    def send(self, line: str) -> None:
        """Write a line to its standard input."""
        with _raised_as(OSError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.drain()

    def close(self) -> None:
        with contextlib.suppress(modal.exception.Error):  # it may have ended
            self._sandbox.terminate()


def _server(app: modal.App, role: Role, number: int, shared: Mapping[str, Any]) -> modal.Server:
    """Return one server with exactly one container: each is notified of new weights at its own address."""
    return app.server(
        **{**shared, "env": {**shared["env"], NUMBER: str(number)}},
        name=f"server-{number}",
        port=PORTS[role.name] + number,
        gpu=_gpu(role),
        min_containers=1,
        max_containers=1,
        unauthenticated=True,  # Modal checks no key, since SGLang checks its own
        startup_timeout=BOOTS_WITHIN_S,
        target_concurrency=0,
    )(Worker)


def _image(config: Config, path: Path, options: Mapping[str, str], *, servers: bool) -> modal.Image:
    """Return the image of the containers: a given one, or one with this rl4llm and, in a separate environment, SGLang."""
    if "image" in options:
        image = modal.Image.from_registry(options["image"])
    else:
        extras = [name.strip() for name in options.get("extras", "").split(",") if name.strip()]
        client = f"modal=={importlib.metadata.version('modal')}"  # for processes that Modal does not start
        image = modal.Image.from_registry(CUDA, add_python=_python()).pip_install(
            *_requirements(extras), client
        )
        if servers:
            make = [f"python -m venv {SERVERS}", f"{SERVERS}/bin/pip install '{SGLANG}'"]
            image = image.run_commands(*make).env({"RL4LLM_SGLANG_PYTHON": f"{SERVERS}/bin/python"})
        image = image.add_local_python_source("rl4llm", ignore=CACHES)
    if modules := _named_modules(config):
        image = image.add_local_python_source(*modules, ignore=CACHES)
    return image.add_local_file(path, CONFIG)


def _requirements(extras: Sequence[str]) -> list[str]:
    """Return what pip must install for this version of rl4llm."""
    requirements = [Requirement(text) for text in importlib.metadata.requires("rl4llm") or ()]
    extras_known = importlib.metadata.metadata("rl4llm").get_all("Provides-Extra") or ()
    for name in extras:
        if name not in extras_known:
            raise ConfigError(unknown("--option extras", name, extras_known))
    return [
        str(item).partition(";")[0].strip()
        for item in requirements
        if not item.marker or any(item.marker.evaluate({"extra": name}) for name in extras)
    ]


def _named_modules(config: Config) -> list[str]:
    """Return the top-level modules of classes and functions that a configuration names as ``package.module:Name``."""
    sections = [config.env, config.rewards, config.parts, config.algorithm, config.inference, config.backend]
    names = filter(NAMED.fullmatch, _strings([*sections, config.sandbox.level]))
    return sorted({re.split(r"[.:]", name)[0] for name in names} - {"rl4llm"})


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings in a value, except models, whose names may look like llama3:latest."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([item for key, item in value.items() if key != "model"])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _secrets(trainer: Role, options: Mapping[str, str]) -> list[modal.Secret]:
    """Return the run's keys, from the caller's environment, and the Modal secret of the options."""
    keys = [modal.Secret.from_local_environ(list(trainer.secrets))] if trainer.secrets else []
    return keys + ([modal.Secret.from_name(options["secret"])] if "secret" in options else [])


def _gpu(role: Role) -> str | None:
    return f"{role.gpu}:{role.gpus}" if role.gpus else None


def _command(role: str, overrides: Sequence[str]) -> list[str]:
    """Return the command that starts a process in this container."""
    return [sys.executable, "-m", "rl4llm", "launch", CONFIG, *overrides, "--as", role]


def _environ(servers: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of every process of the run."""
    path = os.pathsep.join(filter(None, [SOURCES, os.environ.get("PYTHONPATH")]))
    return {
        hosts_variable("trainer"): "trainer",
        hosts_variable("server"): ",".join(servers),
        "PYTHONPATH": path,
    }


def _fitted(config: Config) -> list[str]:
    """Return overrides of the trainer that depend on Modal, unless the configuration sets these keys."""
    served = config.inference["name"] != "local" and "visible_within_s" not in config.inference
    keys = [f"inference.visible_within_s={SHOWS_WITHIN_S}"] if served else []
    return keys + (
        [f"sandbox.level={__name__}:{Programs.__name__}"] if config.sandbox.level == "auto" else []
    )


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _volume() -> modal.Volume:
    """Return the volume in this container.

    `commit` makes local writes visible to others, and `reload` the commits of others here. Both fail while a file is open,
    and if Modal does not respond, and can be retried later.
    """
    return modal.Volume.from_name(os.environ[VOLUME])
