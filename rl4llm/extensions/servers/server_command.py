"""The command line of an inference server; no side effects except looking up programs and ports."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl4llm.core.errors import ConfigError
from rl4llm.core.redact import is_secret_name
from rl4llm.runtime.gpus import ALLOCATOR, VISIBLE
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
        cpu_environment={VISIBLE: ""},
    ),
    "sglang": ServerKind(
        module=("sglang.launch_server",),
        usual_port=30000,
        keys=("--api-key", "--admin-api-key"),
        flags={"--grammar-backend": "llguidance"},  # the trainer's, so that both allow the same tokens
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
            "--structured-outputs-config.backend": "guidance",  # the trainer's library
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
    kind = SERVER_KINDS[engine]
    python = (
        python or os.environ.get(f"RL4LLM_{(kind.environment_of or engine).upper()}_PYTHON") or sys.executable
    )
    # not resolved: the target of a symbolic link would belong to another environment
    program = os.path.abspath(shutil.which(python) or python)
    where, flags = _taken_out(flags, "--host", "--port")
    host = where["--host"] or "127.0.0.1"
    port = int(where["--port"] or kind.usual_port) or free_port(host)
    flags += _key(engine, host, flags)
    if kind.second_port and not _has(kind.second_port, flags):
        flags += [kind.second_port, str(free_port("127.0.0.1", but=port))]
    added = {**kind.flags, **(kind.cpu_flags if cpu else {})}
    if cpu and kind.cpu_module and (_has("--enable-lora", flags) or _has("--lora-paths", flags)):
        added["--lora-backend"] = "torch_native"
    for name, value in added.items():
        if not _has(name, flags):
            flags += [name] if value is None else [name, value]
    flags, keys = _split_keys(flags)
    module = (cpu and kind.cpu_module) or kind.module
    start = [str(SERVERS / "with_flags.py") if keys else "-m", *module]
    variables = {**kind.environment, **(kind.cpu_environment if cpu else {})}
    environment = {name: value for name, value in variables.items() if name not in os.environ}
    environment["PATH"] = os.pathsep.join([str(Path(program).parent), os.environ.get("PATH", os.defpath)])
    if keys:
        environment[FLAGS_VARIABLE] = json.dumps(keys)
    if kind.extended:
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(SERVERS), os.environ.get("PYTHONPATH")])
        )
    if any(_has(name, flags) for name in SLEEPS):  # memory in expandable segments cannot be freed
        environment |= {
            name: os.environ[name].replace("expandable_segments:True", "expandable_segments:False")
            for name in ALLOCATOR
            if name in os.environ
        }
    words = (program, *start, *flags, "--host", host, "--port", str(port))
    return ServerCommand(words, environment, host, port)


def _taken_out(flags: Sequence[str], *names: str) -> tuple[dict[str, str | None], list[str]]:
    """Return the last value of each of these flags, and the other flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name, dest=name, nargs="?")
    values, rest = parser.parse_known_args(flags)
    return vars(values), rest


def _has(name: str, flags: Sequence[str]) -> bool:
    return any(word == name or word.startswith(f"{name}=") for word in flags)


def _split_keys(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the flags into those without and those with keys, each with one value or more."""
    plain: list[str] = []
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
            plain.append(name + equals + value)
    return plain, secret


def _key(engine: str, host: str, flags: Sequence[str]) -> list[str]:
    """Return the flags for the key in the environment, if others can reach the port and no key is given.

    Without a key they could replace the server's weights. Raises ConfigError.
    """
    if is_loopback(host):
        return []
    names = SERVER_KINDS[engine].keys
    values, _ = _taken_out(flags, "--tokenizer-worker-num", *names)
    if not names or values.pop("--tokenizer-worker-num") not in (None, "1"):
        raise ConfigError(
            f"--host {host} is not accepted: {engine} would let anyone who reaches the port replace the weights. Next: use "
            "127.0.0.1 and `ssh -L`, or for SGLang --tokenizer-worker-num 1."
        )
    if any(values.values()):
        return []
    if key := os.environ.get(KEY_VARIABLE):
        return [names[0], key]
    raise ConfigError(
        f"--host {host} needs a key. Set {KEY_VARIABLE} here and for the trainer, or use 127.0.0.1."
    )
