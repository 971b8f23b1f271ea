"""The command line of an inference server: pure, but for looking at programs and ports."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl4llm.core.errors import ConfigError, unknown
from rl4llm.inference.ports import free_port, is_loopback

SERVERS = Path(__file__).parent / "servers"
KEY_VARIABLE = "RL4LLM_SERVER_KEY"
"""Holds the key that servers ask for where other machines reach them, and that clients show."""


@dataclass(frozen=True, slots=True)
class Engine:
    """How one kind of server, or of router in front of servers, is started; flags with the value None stand alone.

    Args:
        module: what ``python -m`` runs, with its first arguments.
        usual_port: the server's own default.
        environment_of: the engine whose environment it is installed in, where that is another one.
        keys: flags that bring a key without which administration is refused.
        second_port: the flag of another port that it listens on; unless given, that is a free one of this machine's own.
        extended: whether it imports files from `rl4llm/inference/servers`.
        flags: added unless given.
        environment: added to this process's, unless set there.
        cpu_script: run instead of `module` on a CPU, when the module does not start there.
        cpu_flags, cpu_environment: added on a CPU, unless given.
    """

    module: tuple[str, ...]
    usual_port: int
    environment_of: str = ""
    keys: tuple[str, ...] = ()
    second_port: str = ""
    extended: bool = False
    flags: Mapping[str, str | None] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    cpu_script: str | None = None
    cpu_flags: Mapping[str, str | None] = field(default_factory=dict)
    cpu_environment: Mapping[str, str] = field(default_factory=lambda: {"OMP_NUM_THREADS": "1"})


ENGINES: Mapping[str, Engine] = {
    "sglang": Engine(
        module=("sglang.launch_server",),
        usual_port=30000,
        keys=("--api-key", "--admin-api-key"),
        cpu_script="sglang_cpu.py",
        cpu_flags={
            "--device": "cpu",
            "--dtype": "float32",
            "--disable-overlap-schedule": None,
            "--mem-fraction-static": "0.1",
            "--max-total-tokens": "16384",
            "--max-running-requests": "64",
            "--sleep-on-idle": None,  # else it keeps a core busy that the trainer could use
        },
    ),
    "sglang-router": Engine(
        module=("sglang_router.launch_router",),
        usual_port=30100,
        environment_of="sglang",
        keys=("--api-key",),
        second_port="--prometheus-port",
        flags={
            "--prometheus-host": "127.0.0.1",  # its own is every address, at the same port for all routers of a machine
            "--policy": "round_robin",  # its own default sends all that begins with the same system prompt to one server
            "--health-check-interval-secs": "1",  # its own of a minute is how long a server that is added would idle
            "--health-success-threshold": "1",
            "--worker-startup-check-interval": "1",
            "--worker-startup-timeout-secs": "31536000",  # else a server that comes after half an hour is never asked
        },
        cpu_script="sglang_router_cpu.py",
    ),
    "vllm": Engine(
        module=("vllm.entrypoints.cli.main", "serve"),
        usual_port=8000,
        extended=True,
        flags={
            "--worker-extension-cls": "vllm_worker_extension.WeightsExtension",
            "--logprobs-mode": "processed_logprobs",  # of what the policy sampled from, at any temperature
        },
        environment={"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
        cpu_flags={"--dtype": "float32", "--enforce-eager": None, "--max-num-seqs": "64"},
        cpu_environment={"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    ),
}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What starts a server: the words of its command line, what it adds to the environment, and where it will listen."""

    engine: str
    words: tuple[str, ...] = field(repr=False)  # there may be keys among them
    environment: Mapping[str, str]
    host: str
    port: int


def server_command(
    engine: str, flags: Sequence[str] = (), *, python: str | None = None, cpu: bool = False
) -> ServerCommand:
    """The command line of a server; raises ConfigError for what must not be started.

    >>> server_command("sglang", ["--model-path", "m"], python="python3").words[1:]
    ('-m', 'sglang.launch_server', '--model-path', 'm', '--host', '127.0.0.1', '--port', '30000')

    Args:
        engine: "sglang", "sglang-router" or "vllm".
        flags: the server's own; port 0 is replaced by a free one.
        python: the interpreter of the server's environment; None takes RL4LLM_SGLANG_PYTHON or RL4LLM_VLLM_PYTHON, or else
            this process's own.
        cpu: for tests and small models on a machine without a GPU.
    """
    if engine not in ENGINES:
        raise ConfigError(unknown("engine", engine, ENGINES))
    kind = ENGINES[engine]
    program = _program(kind.environment_of or engine, python)
    _check_model(flags)
    host, port, flags = _address(kind, list(flags))
    flags += _key(kind, host, flags)
    _refuse_open_door(engine, kind, host, flags)
    if kind.second_port and not _given(kind.second_port, flags):
        flags += [kind.second_port, str(free_port("127.0.0.1"))]
    flags += _missing({**kind.flags, **(_cpu_flags(kind, flags) if cpu else {})}, flags)
    start = [str(SERVERS / kind.cpu_script)] if cpu and kind.cpu_script else ["-m", *kind.module]
    added = {**kind.environment, **(kind.cpu_environment if cpu else {})}
    environment = {name: value for name, value in added.items() if name not in os.environ}
    environment["PATH"] = os.pathsep.join([str(Path(program).parent), os.environ.get("PATH", os.defpath)])
    if kind.extended:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SERVERS), os.environ.get("PYTHONPATH")]))
    where = ["--host", host, "--port", str(port)]  # last, so that they hold whatever came before
    return ServerCommand(engine, (program, *start, *flags, *where), environment, host, port)


def boot_advice(engine: str, cpu: bool, log: str) -> str:
    """What to do about a server that died while it booted, where its log tells; else nothing."""
    environment = ENGINES[engine].environment_of or engine
    module = ENGINES[engine].module[0].partition(".")[0]
    if f"No module named '{module}'" in log:
        return (
            f" Next: name the Python of {environment}'s environment with --python or RL4LLM_{environment.upper()}_PYTHON; "
            f"without a GPU, scripts/install_{environment}_cpu.sh VENV makes one."
        )
    if not cpu and shutil.which("nvidia-smi") is None:
        return " No GPU was found here (there is no nvidia-smi). Next: add --cpu, for tests and small models."
    return ""


def _check_model(flags: Sequence[str]) -> None:
    """A path that leads nowhere would be taken for a name on the hub, and be reported as a strange one."""
    words = [_taken_out(name, flags)[0] for name in ("--model-path", "--model")]
    for word in (*words, *flags[:1]):
        if word and word.startswith(("/", "./", "../", "~")) and not Path(word).expanduser().is_dir():
            raise ConfigError(f"The model {word} is no directory on this machine. Next: check the path, or give a hub name.")


def _program(engine: str, python: str | None) -> str:
    variable = f"RL4LLM_{engine.upper()}_PYTHON"
    given = python or os.environ.get(variable) or sys.executable
    program = shutil.which(given)
    if program is None:
        raise ConfigError(
            f"{given!r} is no program, but should be the Python of {engine}'s environment, such as VENV/bin/python. Next: "
            f"make one, without a GPU with scripts/install_{engine}_cpu.sh VENV, and name it with --python or {variable}."
        )
    return os.path.abspath(program)  # as it is: a link into another environment would lose the environment


def _address(kind: Engine, flags: list[str]) -> tuple[str, int, list[str]]:
    """Host, port, and the flags without them."""
    host, flags = _taken_out("--host", flags)
    port, flags = _taken_out("--port", flags)
    host = host or "127.0.0.1"
    if port is not None and not (port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"--port {port} is not accepted: a number from 1 to 65535, or 0 for a free one.")
    number = kind.usual_port if port is None else int(port)
    return host, number or free_port(host), flags


def _taken_out(name: str, flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """The last value of a flag, and the other flags."""
    value, others, words = None, [], iter(flags)
    for word in words:
        if word == name:
            value = next(words, "")
        elif word.startswith(f"{name}="):
            value = word.removeprefix(f"{name}=")
        else:
            others.append(word)
    return value, others


def _given(name: str, flags: Sequence[str]) -> bool:
    return any(word == name or word.startswith(f"{name}=") for word in flags)


def _missing(wanted: Mapping[str, str | None], flags: Sequence[str]) -> list[str]:
    """Words for the wanted flags that are not given."""
    return [
        word
        for name, value in wanted.items()
        if not _given(name, flags)
        for word in ((name,) if value is None else (name, value))
    ]


def _cpu_flags(kind: Engine, flags: Sequence[str]) -> Mapping[str, str | None]:
    adapters = kind.cpu_script and (_given("--enable-lora", flags) or _given("--lora-paths", flags))
    return {**kind.cpu_flags, "--lora-backend": "torch_native"} if adapters else kind.cpu_flags


def _key(kind: Engine, host: str, flags: Sequence[str]) -> list[str]:
    """The flags for the key of the environment, where one is needed and none is given."""
    key = os.environ.get(KEY_VARIABLE, "")
    if is_loopback(host) or not kind.keys or not key or any(_given(name, flags) for name in kind.keys):
        return []
    return [kind.keys[0], key]


def _refuse_open_door(engine: str, kind: Engine, host: str, flags: Sequence[str]) -> None:
    """Who reaches a server's port can replace its weights, so a port that others reach needs a key."""
    if is_loopback(host):
        return
    if not kind.keys:
        raise ConfigError(
            f"--host {host} is not accepted for {engine}: whoever reaches the port could replace the weights, and {engine} "
            "asks for its key on /v1 only. Next: keep 127.0.0.1, and reach it through `ssh -L` or a proxy that checks a key."
        )
    if not any(_taken_out(name, flags)[0] for name in kind.keys):
        raise ConfigError(
            f"--host {host} without a key is not accepted: whoever reaches the port could replace the weights. Next: set "
            f"{KEY_VARIABLE}, here and for the trainer, or add {kind.keys[0]} KEY, or keep 127.0.0.1."
        )
    workers, _ = _taken_out("--tokenizer-worker-num", flags)
    if workers not in (None, "1"):
        raise ConfigError(
            f"--host {host} with --tokenizer-worker-num {workers} is not accepted: {engine} then checks no key. Next: leave "
            "it at 1, or keep 127.0.0.1."
        )
