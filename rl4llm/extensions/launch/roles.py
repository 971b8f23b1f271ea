"""The roles of a run: training machines, inference servers, a router in front of them, environment servers.

A launcher starts one command per process, ``rl4llm launch CONFIG --as ROLE``. Environment variables hold its number
within its role, `RL4LLM_NUMBER`, and the hosts of all roles: `RL4LLM_TRAINER_HOSTS` and so on. Hosts are names
separated by commas, each with `:PORT` if it is not the default port; a server behind a gateway is a full URL,
https://NAME. `words` turns all of this into the command line that the process becomes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl4llm.config import Config, flatten, load_config
from rl4llm.core.errors import ConfigError
from rl4llm.core.redact import HIDDEN
from rl4llm.runs.run_dir import RunDir
from rl4llm.runtime.ports import KEY_VARIABLE as SERVER_KEY
from rl4llm.runtime.ports import is_loopback

NUMBER = "RL4LLM_NUMBER"
ENV_TOKEN = "RL4LLM_ENV_TOKEN"  # same as in rl4llm.extensions.remote.token, whose package imports torch
PORTS = {"trainer": 29500, "server": 30000, "router": 30100, "env": 50051}
"""The port of the first process of each role; the next one gets the next port, so that several fit on one machine."""

WITH_PORT = re.compile(r"(\[.*\]|[^:]*):(\d+)")  # an IPv6 address has more than one colon
SGLANG = "sglang>=0.5.2,<0.6"  # needs another torch than rl4llm, so it is none of its extras
CPUS, CPUS_WITH_GPU, GIB_OF_CPU = 4, 8, 8
"""Processors of a process without a GPU, and for each GPU; memory for each processor: Slurm's defaults."""
SHARDS = {"sglang": "--tp-size", "vllm": "--tensor-parallel-size"}
COMPUTING = ("model.dtype", "model.autocast", "model.vision", "deterministic", "threads")
"""Keys that a server of the embedded engine needs too, to compute as the trainer does."""
IN_TURNS = {
    "sglang": ("--enable-memory-saver", "--mem-fraction-static", "0.7"),
    "vllm": ("--enable-sleep-mode", "--gpu-memory-utilization", "0.7"),
}
"""Flags of a server on the trainer's GPU: it can free its memory, and leaves some for what the trainer keeps there."""


@dataclass(frozen=True, slots=True)
class Role:
    """One kind of process of a run.

    Args:
        count: number of processes; for the trainer, machines with `nproc` processes each.
        command: starts each process, given the environment variables with all hosts.
        gpus, gpu: number of GPUs of each process, and their type, or None for any.
        shares_gpus: whether its processes use the trainer's GPUs, in turns with it.
        secrets: environment variables that must be set where it runs; no file contains them.
        cpus: processors that launchers ask for, by default, for each process.
    """

    name: str
    count: int
    command: tuple[str, ...]
    gpus: int = 0
    gpu: str | None = None
    secrets: tuple[str, ...] = ()
    shares_gpus: bool = False
    cpus: int = CPUS


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A run for a launcher to start.

    Args:
        name: lower-case letters, digits and "-", which all launchers accept.
        roles: those of the run, trainer first.
        directory: base of relative paths in the configuration, on every machine.
        options: the values of `--option KEY=VALUE`; each launcher's module lists its options.
        config: the text of the configuration.
    """

    name: str
    roles: Sequence[Role]
    directory: Path
    options: Mapping[str, str] = field(default_factory=dict)
    config: str = ""

    @property
    def secrets(self) -> list[str]:
        """Environment variables that must be set where the job is submitted."""
        return list(dict.fromkeys(name for role in self.roles for name in role.secrets))


def roles(config: Config, command: Sequence[str], *, here: bool = False) -> list[Role]:
    """Return the roles of a configuration's run, trainer first. Raises ConfigError for roles that do not go together.

        >>> from rl4llm.config import load_config
        >>> chosen = load_config(overrides=["model.path=m", "inference.name=sglang", "launch.servers=2", "launch.nproc=8"])
        >>> [(role.name, role.count, role.gpus) for role in roles(chosen, ["rl4llm", "launch", "x.yaml"])]
        [('trainer', 1, 8), ('server', 2, 1)]

    Args:
        command: ``rl4llm launch CONFIG``, to which `--as ROLE` is added.
        here: whether all processes run on this machine, where others cannot reach their ports.
    """
    launch, cpu = config.launch, config.model.device == "cpu"
    _check(config, here)
    counts = {
        "trainer": (launch.nodes, 0 if cpu else launch.nproc, launch.gpu),
        "server": (launch.servers, launch.server_gpus, launch.server_gpu or launch.gpu),
        "router": (int(launch.router), 0, None),
        "env": (launch.env_hosts, 0, None),
    }
    return [
        Role(
            name,
            count,
            (*command, "--as", name),
            gpus,
            gpu if gpus else None,
            () if here else _secrets(config, name),
            shares_gpus=name == "server" and bool(config.inference.get("cohost")),
            cpus=gpus * CPUS_WITH_GPU or CPUS * (launch.nproc if name == "trainer" else 1),
        )
        for name, (count, gpus, gpu) in counts.items()
        if count
    ]


def hosts_variable(role: str) -> str:
    """Return the environment variable with the hosts of a role."""
    return f"RL4LLM_{role.upper()}_HOSTS"


def read_hosts(environ: Mapping[str, str], roles: Sequence[Role]) -> dict[str, list[str]]:
    """Return the hosts of each role, from the environment. Raises ConfigError if a role lacks hosts."""
    hosts = {}
    for role in roles:
        text = environ.get(hosts_variable(role.name), "")
        hosts[role.name] = [host.strip() for host in text.split(",") if host.strip()]
        if len(hosts[role.name]) != role.count:
            raise ConfigError(
                f"{hosts_variable(role.name)}={text!r} is not accepted. Accepted: {role.count} host(s)."
            )
    return hosts


def words(
    config: Config, source: Sequence[str], role: Role, number: int, hosts: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the command line, after ``rl4llm``, of process `number` of a role.

    `source` are the configuration file and its overrides; the hosts of each role are in the order of their numbers.
    """
    host, port = place(role.name, hosts[role.name][number], number)
    where = ["--host", "127.0.0.1" if is_loopback(host) else "0.0.0.0", "--port", str(port)]
    supervised = ["--restarts", "3", *([] if config.launch.server_gpus else ["--cpu"])]
    if role.name == "server":
        return [*_server(config, supervised), *_log(config, "server", number, host), *where]
    if role.name == "router":
        flags = [*supervised, *_log(config, "router", number, host)]
        urls = [_url("server", host, number) for number, host in enumerate(hosts["server"])]
        return ["serve", "--engine", "sglang-router", *flags, "--worker-urls", *urls, *where]
    if role.name == "env":
        names = dict.fromkeys(part.env["name"] for part in config.environments.values())
        return ["serve", "env", "--env", ",".join(names), *where]
    return ["launch", *source, *_connected(config, hosts), *_ranks(config, number, hosts["trainer"])]


def part(
    config: str, overrides: Sequence[str], name: str, environ: Mapping[str, str], *, force: bool = False
) -> list[str]:
    """Return the words after ``rl4llm`` of the process with the role `name`.

    `environ` has RL4LLM_NUMBER and the hosts of every role of the configuration.
    """
    chosen = load_config(config, overrides)
    here = all(is_loopback(host) for host in environ.get(hosts_variable("trainer"), "?").split(","))
    by_name = {role.name: role for role in roles(chosen, ("rl4llm", "launch", config), here=here)}
    if name not in by_name:
        raise ConfigError(f"--as {name}: {config} has no such role. Its roles: {', '.join(by_name)}.")
    hosts = read_hosts(environ, list(by_name.values()))
    command = words(chosen, [config, *overrides], by_name[name], int(environ.get(NUMBER, 0)), hosts)
    return [*command, "--force"] if force and name == "trainer" else command


def place(role: str, host: str, number: int) -> tuple[str, int]:
    """Return the host and port on which process `number` of a role listens.

    >>> place("server", "node3", 1), place("server", "127.0.0.1:20123", 1), place("env", "[fe80::1]:7", 0)
    (('node3', 30001), ('127.0.0.1', 20123), ('fe80::1', 7))
    """
    match = WITH_PORT.fullmatch(host)
    return (match[1].strip("[]"), int(match[2])) if match else (host, PORTS[role] + number)


def address(role: str, host: str, number: int) -> str:
    """Return host:port of process `number` of a role."""
    name, port = place(role, host, number)
    return f"{f'[{name}]' if ':' in name else name}:{port}"


def log_of(run_dir: RunDir, role: str, number: int) -> Path:
    """Return the log file of a process of a run on one machine."""
    return run_dir.logs_dir / f"{role}-{number}.log"


def _url(role: str, host: str, number: int) -> str:
    """Return the URL of process `number` of a role; a server behind a gateway is already a full URL."""
    return host if "://" in host else f"http://{address(role, host, number)}"


def _server(config: Config, supervised: Sequence[str]) -> list[str]:
    from rl4llm.backends.model_files import model_directory  # noqa: PLC0415 - imports torch

    engine, launch, model = config.inference["name"], config.launch, str(model_directory(config.model.path))
    named = ["--model-path", model] if engine == "sglang" else [model]
    shards = [SHARDS[engine], str(launch.server_gpus)] if launch.server_gpus > 1 else []
    in_turns = IN_TURNS[engine] if launch.server_gpus and config.inference.get("cohost") else ()
    keys = flatten(config.values())
    computing = [f"{key}={str(keys[key]).lower()}" for key in COMPUTING] if engine == "embedded" else []
    flags = [*supervised, *named, *shards, *in_turns, *computing]
    return ["serve", "--engine", engine, *flags, *launch.server_flags]


def _log(config: Config, role: str, number: int, host: str) -> list[str]:
    """Return the option of a log file on this machine; elsewhere there is none, since a log might contain a key."""
    return ["--log", str(log_of(RunDir(config.output.dir), role, number))] if is_loopback(host) else []


def _connected(config: Config, hosts: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the overrides that give the trainer the addresses of the others."""
    keys = []
    if servers := hosts.get("server"):
        urls = [_url("server", host, number) for number, host in enumerate(servers)]
        keys.append(f"inference.url={json.dumps(urls)}")
    if routers := hosts.get("router"):
        keys.append(f"inference.router=http://{address('router', routers[0], 0)}")
    if env_hosts := hosts.get("env"):
        addresses = json.dumps([address("env", host, number) for number, host in enumerate(env_hosts)])
        parts = [f"parts.{name}.env.remote" for name, part in config.parts.items() if "env" in part]
        keys += [f"{key}={addresses}" for key in ("env.remote", *parts)]
    return keys


def _ranks(config: Config, number: int, trainers: Sequence[str]) -> list[str]:
    words = ["--nproc", str(config.launch.nproc), "--nnodes", str(len(trainers)), "--restarts", "3"]
    if len(trainers) == 1:
        return words
    return [*words, "--node-rank", str(number), "--rendezvous", address("trainer", trainers[0], 0)]


def _secrets(config: Config, role: str) -> tuple[str, ...]:
    """Return the secrets that a role's process must have, to send or to check."""
    keys = [SERVER_KEY] if config.launch.servers and role in ("trainer", "server", "router") else []
    keys += [ENV_TOKEN] if config.launch.env_hosts and role in ("trainer", "env") else []
    # those that the configuration names are read when it is loaded
    return tuple(dict.fromkeys([*keys, *(name for name, secret in config.variables().items() if secret)]))


def _check(config: Config, here: bool) -> None:
    """Refuse what would generate while servers sleep, serve everybody, or write keys into files."""
    launch, engine, cohost = config.launch, config.inference["name"], config.inference.get("cohost")
    written = {} if here else flatten(config.stored(elsewhere=True))
    hidden = sorted(key for key, value in written.items() if HIDDEN in str(value))
    refusals = {
        "launch.router=true needs launch.servers, and no inference.cohost: its checks make sleeping servers generate. "
        "Remove it.": launch.router and (cohost or not launch.servers),
        f"launch.servers={launch.servers} is not accepted with inference.name='local', and with 'embedded' only with one "
        "GPU each, and no inference.cohost. Set inference.name=sglang.": launch.servers
        and (engine == "local" or (engine == "embedded" and (launch.server_gpus > 1 or cohost))),
        "launch.nodes above 1 is not accepted on a single machine. Use --on slurm, or launch.nodes=1.":
        here and launch.nodes > 1,
        "inference.name=vllm and inference.cohost=true are not accepted on other machines, where vLLM would serve everybody "
        "without a key, and no GPU is shared. Use --on local.": not here and launch.servers and (engine == "vllm" or cohost),
        f"{hidden and hidden[0]} contains a key or password, which would be written into files. Set {SERVER_KEY} or "
        f"{ENV_TOKEN} instead, or write ${{oc.env:NAME}} in its place.": hidden,
    }  # fmt: skip
    for text, applies in refusals.items():
        if applies:
            raise ConfigError(text)
