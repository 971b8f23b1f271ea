"""The command line of an inference server; no side effects except looking up programs and ports."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.redact import is_secret_name
from rl4llm.runtime.ports import KEY_VARIABLE, free_port, is_loopback

SERVERS = Path(__file__).parent / "inside"
SLEEPS = ("--enable-memory-saver", "--enable-sleep-mode")  # flags of servers that can free their memory
FLAGS_VARIABLE = "RL4LLM_SERVER_FLAGS"
"""Passes flags with keys to `rl4llm/extensions/servers/inside/with_flags.py`, since every user can read command lines."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """How one kind of server, or of router in front of servers, is started; a flag with the value None has no argument.

    Args:
        module: what ``python -m`` runs, with its first arguments.
        environment_of: the engine in whose environment it is installed, if that is another one.
        keys: flags for a key that protects administration.
        second_port: the flag of another port that it listens on; by default a free port.
        extended: whether it imports files from `rl4llm/extensions/servers/inside`.
        flags: added unless given.
        environment: added to this process's, unless set there.
        cpu_module: run instead of `module` on a CPU, if that does not start there; the installing script puts it there.
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
    cpu_module: tuple[str, ...] = ()
    cpu_flags: Mapping[str, str | None] = field(default_factory=dict)
    cpu_environment: Mapping[str, str] = field(default_factory=lambda: {"OMP_NUM_THREADS": "1"})


SERVER_KINDS: Mapping[str, ServerKind] = {
    "embedded": ServerKind(
        module=("rl4llm.extensions.servers.embedded",),
        usual_port=30200,
        keys=("--api-key",),
        cpu_environment={"CUDA_VISIBLE_DEVICES": ""},
    ),
    "sglang": ServerKind(
        module=("sglang.launch_server",),
        usual_port=30000,
        keys=("--api-key", "--admin-api-key"),
        cpu_module=("sglang_cpu",),
        cpu_flags={
            "--device": "cpu",
            "--dtype": "float32",
            "--disable-overlap-schedule": None,
            "--mem-fraction-static": "0.1",
            "--max-total-tokens": "16384",
            "--max-running-requests": "64",
            "--sleep-on-idle": None,  # otherwise it keeps a core busy that the trainer could use
        },
    ),
    "sglang-router": ServerKind(
        module=("sglang_router.launch_router",),
        usual_port=30100,
        environment_of="sglang",
        keys=("--api-key",),
        second_port="--prometheus-port",
        flags={
            "--prometheus-host": "127.0.0.1",  # the default is every address, at the same port for all routers of a machine
            "--policy": "round_robin",  # the default sends all requests with the same system prompt to one server
            "--health-check-interval-secs": "1",  # with the default of a minute, an added server would idle that long
            "--health-success-threshold": "1",
            "--worker-startup-check-interval": "1",
            "--worker-startup-timeout-secs": "31536000",  # otherwise a server that starts late gets no requests
        },
        cpu_module=("sglang_router_cpu",),
    ),
    "vllm": ServerKind(
        module=("vllm.entrypoints.cli.main", "serve"),
        usual_port=8000,
        extended=True,
        flags={
            "--worker-extension-cls": "vllm_worker_extension.WeightsExtension",
            "--logprobs-mode": "processed_logprobs",  # log-probs of the sampling distribution, at any temperature
        },
        environment={"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
        cpu_flags={
            "--dtype": "float32",
            "--enforce-eager": None,
            "--max-num-seqs": "64",
            "--no-enable-chunked-prefill": None,  # vLLM 0.32 dies of a seeded prompt that is computed in pieces
        },
        cpu_environment={"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    ),
}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started: its command line, its additional environment, and its address."""

    engine: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)  # values may contain keys
    host: str
    port: int


def server_command(
    engine: str, flags: Sequence[str] = (), *, python: str | None = None, cpu: bool = False
) -> ServerCommand:
    """Return the command line of a server. Raises ConfigError for settings that are not safe or not valid.

        >>> server_command("sglang", ["--model-path", "m"], python="python3").words[1:]
        ('-m', 'sglang.launch_server', '--model-path', 'm', '--host', '127.0.0.1', '--port', '30000')

    Args:
        flags: the server's flags; port 0 is replaced by a free one.
        python: the interpreter of the server's environment; by default RL4LLM_SGLANG_PYTHON or RL4LLM_VLLM_PYTHON, or
            else this process's interpreter.
    """
    if engine not in SERVER_KINDS:
        raise ConfigError(unknown("engine", engine, SERVER_KINDS))
    kind = SERVER_KINDS[engine]
    program = _program(kind.environment_of or engine, python)
    host, port, flags = _address(kind, list(flags))
    flags += _key(kind, host, flags)
    _refuse_open_door(engine, kind, host, flags)
    if kind.second_port and not _given(kind.second_port, flags):
        flags += [kind.second_port, str(free_port("127.0.0.1", but=port))]
    flags += _missing({**kind.flags, **(_cpu_flags(kind, flags) if cpu else {})}, flags)
    flags, keys = _apart(flags)
    module = (cpu and kind.cpu_module) or kind.module
    start = [str(SERVERS / "with_flags.py") if keys else "-m", *module]
    added = {**kind.environment, **(kind.cpu_environment if cpu else {})}
    environment = {name: value for name, value in added.items() if name not in os.environ}
    environment["PATH"] = os.pathsep.join([str(Path(program).parent), os.environ.get("PATH", os.defpath)])
    if keys:
        environment[FLAGS_VARIABLE] = json.dumps(keys)
    if kind.extended:
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(SERVERS), os.environ.get("PYTHONPATH")])
        )
    if any(_given(name, flags) for name in SLEEPS):
        environment |= _without_segments(os.environ)
    where = ["--host", host, "--port", str(port)]  # last, so that they override earlier flags
    return ServerCommand(engine, (program, *start, *flags, *where), environment, host, port)


def boot_advice(engine: str, cpu: bool, log: str) -> str:
    """Return what to do about a server that died during its start, if its log shows the reason; else ""."""
    environment = SERVER_KINDS[engine].environment_of or engine
    module = SERVER_KINDS[engine].module[0].partition(".")[0]
    if re.search(rf"No module named '?{module}", log):
        return (
            f" Next: pass the Python of {environment}'s environment with --python or RL4LLM_{environment.upper()}_PYTHON; "
            f"for machines without a GPU, scripts/install_{environment}_cpu.sh VENV creates one."
        )
    if SERVER_KINDS[engine].cpu_flags and not cpu and shutil.which("nvidia-smi") is None:
        return " No GPU was found (nvidia-smi is not installed). Next: add --cpu, for tests and small models."
    return ""


def _without_segments(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of torch's allocator without expandable segments, whose memory a server could not free."""
    found = {
        name: environ[name] for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name in environ
    }
    return {
        name: value.replace("expandable_segments:True", "expandable_segments:False")
        for name, value in found.items()
    }


def _program(engine: str, python: str | None) -> str:
    variable = f"RL4LLM_{engine.upper()}_PYTHON"
    given = python or os.environ.get(variable) or sys.executable
    program = shutil.which(given)
    if program is None:
        raise ConfigError(
            f"{given!r} is not an executable; it should be the Python of {engine}'s environment, such as VENV/bin/python. "
            f"Next: install {engine} (without a GPU: scripts/install_{engine}_cpu.sh VENV), and pass its Python with "
            f"--python or {variable}."
        )
    # not resolved: the target of a symbolic link would belong to another environment
    return os.path.abspath(program)


def _address(kind: ServerKind, flags: list[str]) -> tuple[str, int, list[str]]:
    """Return host, port, and the flags without them."""
    host, flags = _taken_out("--host", flags)
    port, flags = _taken_out("--port", flags)
    host = host or "127.0.0.1"
    number = kind.usual_port if port is None else int(port)
    return host, number or free_port(host), flags


def _taken_out(name: str, flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the last value of a flag, and the other flags."""
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


def _apart(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the flags into those without and those with keys, each with one value or more."""
    shown: list[str] = []
    secret: list[str] = []
    words = list(flags)
    while words:
        name, equals, value = words.pop(0).partition("=")
        keys = name.startswith("--") and is_secret_name(name.replace("-keys", "-key"))
        if keys and not equals and words and not words[0].startswith("--"):
            secret += [name, words.pop(0)]
            while words and not words[0].startswith("-"):
                secret.append(words.pop(0))
        elif keys and equals:
            secret += [name, value]
        else:
            shown.append(name + equals + value)
    return shown, secret


def _missing(wanted: Mapping[str, str | None], flags: Sequence[str]) -> list[str]:
    """Return words for the wanted flags that are not given."""
    return [
        word
        for name, value in wanted.items()
        if not _given(name, flags)
        for word in ((name,) if value is None else (name, value))
    ]


def _cpu_flags(kind: ServerKind, flags: Sequence[str]) -> Mapping[str, str | None]:
    """Return the flags of a server without a GPU; adapters need another backend there."""
    adapters = kind.cpu_module and (_given("--enable-lora", flags) or _given("--lora-paths", flags))
    return {**kind.cpu_flags, "--lora-backend": "torch_native"} if adapters else kind.cpu_flags


def _key(kind: ServerKind, host: str, flags: Sequence[str]) -> list[str]:
    """Return the flags for the key in the environment, if one is needed and none is given."""
    key = os.environ.get(KEY_VARIABLE, "")
    if is_loopback(host) or not kind.keys or not key or any(_given(name, flags) for name in kind.keys):
        return []
    return [kind.keys[0], key]


def _refuse_open_door(engine: str, kind: ServerKind, host: str, flags: Sequence[str]) -> None:
    """Require a key for a port that others can reach, since they could replace the server's weights."""
    if is_loopback(host):
        return
    if not kind.keys:
        raise ConfigError(
            f"--host {host} is not accepted for {engine}: anyone who reaches the port could replace the weights, since "
            f"{engine} checks its key only on /v1. "
            "Next: use 127.0.0.1, and connect through `ssh -L` or a proxy that checks a key."
        )
    if not any(_taken_out(name, flags)[0] for name in kind.keys):
        raise ConfigError(
            f"--host {host} without a key is not accepted: anyone who reaches the port could replace the weights. Next: set "
            f"{KEY_VARIABLE} here and for the trainer, or add {kind.keys[0]} KEY, or use 127.0.0.1."
        )
    workers, _ = _taken_out("--tokenizer-worker-num", flags)
    if workers not in (None, "1"):
        raise ConfigError(
            f"--host {host} with --tokenizer-worker-num {workers} is not accepted: {engine} then checks no key. Next: set "
            "it to 1, or use 127.0.0.1."
        )
