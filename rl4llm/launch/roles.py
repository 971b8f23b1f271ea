"""The roles of a run: machines that train, inference servers, a router in front of them, hosts of environments.

Whatever starts them starts one command for each, ``rl4llm launch CONFIG --as ROLE``, and says by environment variables
which of its kind it is, `RL4LLM_NUMBER`, and where all of them are: `RL4LLM_TRAINER_HOSTS` and so on, names of hosts with
commas between, each with `:PORT` where that is not the usual one; a server behind a gateway is a whole address, https://NAME.
`words` turns that into the command line that the process becomes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl4llm.config import Config, by_part, flatten
from rl4llm.core.errors import ConfigError
from rl4llm.core.run_dir import RunDir
from rl4llm.inference.command import KEY_VARIABLE as SERVER_KEY
from rl4llm.inference.ports import is_loopback
from rl4llm.tracking.redact import redacted

NUMBER = "RL4LLM_NUMBER"
ENV_TOKEN = "RL4LLM_ENV_TOKEN"  # as rl4llm.envs.remote.token has it, whose package imports torch
PORTS = {"trainer": 29500, "server": 30000, "router": 30100, "env": 50051}
"""Of the first of each; the next one has the next port, so that several fit on one machine."""

WITH_PORT = re.compile(r"(\[.*\]|[^:]*):(\d+)")  # an address of IPv6 has more than one colon
SHARDS = {"sglang": "--tp-size", "vllm": "--tensor-parallel-size"}


@dataclass(frozen=True, slots=True)
class Role:
    """One kind of process of a run.

    Args:
        name: trainer, server, router or env.
        count: how many; of the trainer, machines, each with `nproc` processes.
        command: what starts each of them, once the environment says where all are.
        gpus: of each; 0 is a CPU's work.
        gpu: their type; None takes any.
        secrets: environment variables that must be set where it runs, and are in no file.
        shared: whether it must see output.dir, models and data under the same path as the trainer.
    """

    name: str
    count: int
    command: tuple[str, ...]
    gpus: int = 0
    gpu: str | None = None
    secrets: tuple[str, ...] = ()
    shared: bool = False

    def port(self, number: int) -> int:
        """Where the one with this number listens."""
        return PORTS[self.name] + number


def roles(config: Config, command: Sequence[str], *, here: bool = False) -> list[Role]:
    """What a configuration's run consists of, trainer first; raises ConfigError for what cannot be started together.

    >>> from rl4llm.config import load_config
    >>> chosen = load_config(overrides=["model.path=m", "inference.name=sglang", "launch.servers=2", "launch.nproc=8"])
    >>> [(role.name, role.count, role.gpus) for role in roles(chosen, ["rl4llm", "launch", "x.yaml"])]
    [('trainer', 1, 8), ('server', 2, 1)]

    Args:
        command: ``rl4llm launch CONFIG``, to which `--as ROLE` is added.
        here: whether all of them run on this machine, where nobody else reaches their ports.
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
            shared=name != "router",
        )
        for name, (count, gpus, gpu) in counts.items()
        if count
    ]


def nobody_starts(config: Config) -> str:
    """What to tell a trainer that was started alone, though its section `launch` asks for others; "" when all is well."""
    remote = [config.env.get("remote"), *(part.get("env", {}).get("remote") for part in config.parts.values())]
    asked = {
        "servers": config.launch.servers if not config.inference.get("url") else 0,
        "env_hosts": config.launch.env_hosts if not any(remote) else 0,
    }
    missed = ", ".join(f"launch.{name}={count}" for name, count in asked.items() if count)
    return f"{missed}: started by `rl4llm launch CONFIG --on ENGINE` only, not by this command." if missed else ""


def hosts_variable(role: str) -> str:
    """The environment variable that says where all of a role are."""
    return f"RL4LLM_{role.upper()}_HOSTS"


def read_hosts(environ: Mapping[str, str], wanted: Sequence[Role]) -> dict[str, list[str]]:
    """The hosts of each role, from the environment; raises ConfigError for one that is missing or has too few."""
    found = {}
    for role in wanted:
        variable = hosts_variable(role.name)
        found[role.name] = [host.strip() for host in environ.get(variable, "").split(",") if host.strip()]
        if len(found[role.name]) != role.count:
            raise ConfigError(
                f"{variable}={environ.get(variable, '')!r} is not accepted: {role.count} host(s), as the configuration's "
                "section `launch` says, with commas between. The files that `rl4llm launch --on ENGINE` writes set it."
            )
    return found


def words(config: Config, source: Sequence[str], role: Role, number: int, hosts: Mapping[str, Sequence[str]]) -> list[str]:
    """The command line, after ``rl4llm``, of number `number` of a role.

    Args:
        source: the configuration file and its overrides, as the command line has them.
        hosts: where all of each role are, in the order of their numbers.
    """
    if not 0 <= number < role.count:
        raise ConfigError(f"{NUMBER}={number} is not accepted for --as {role.name}: 0 to {role.count - 1}.")
    host, port = place(role.name, hosts[role.name][number], number)
    where = ["--host", "127.0.0.1" if is_loopback(host) else "0.0.0.0", "--port", str(port)]
    if role.name == "server":
        return [*_server(config), *_log(config, "server", number, host), *where]
    if role.name == "router":
        own = [*_cpu(config), "--restarts", "3", *_log(config, "router", number, host)]
        return ["serve", "--engine", "sglang-router", *own, *_workers(hosts["server"]), *where]
    if role.name == "env":
        return ["serve-env", "--env", ",".join(_hosted(config)), *where]
    return ["launch", *source, *_connected(config, hosts), *_ranks(config, number, hosts["trainer"])]


def place(role: str, host: str, number: int) -> tuple[str, int]:
    """Where number `number` of a role listens.

    >>> place("server", "node3", 1), place("server", "127.0.0.1:20123", 1), place("env", "[fe80::1]:7", 0)
    (('node3', 30001), ('127.0.0.1', 20123), ('fe80::1', 7))
    """
    found = WITH_PORT.fullmatch(host)
    if found is None:
        return host, PORTS[role] + number
    return found[1].strip("[]"), int(found[2])


def address(role: str, host: str, number: int) -> str:
    """host:port of number `number` of a role."""
    name, port = place(role, host, number)
    return f"{f'[{name}]' if ':' in name else name}:{port}"


def log_of(config: Config, role: str, number: int) -> Path:
    """Where a process of a run on one machine says what it says."""
    return RunDir(config.output.dir).logs_dir / f"{role}-{number}.log"


def _url(role: str, host: str, number: int) -> str:
    """Where HTTP reaches number `number` of a role; a host behind a gateway of its own is a whole address already."""
    return host if "://" in host else f"http://{address(role, host, number)}"


def _server(config: Config) -> list[str]:
    from rl4llm.backends.models import model_directory  # noqa: PLC0415 - imports torch

    engine, launch, model = config.inference["name"], config.launch, str(model_directory(config.model.path))
    named = [model] if engine == "vllm" else ["--model-path", model]
    shards = [SHARDS[engine], str(launch.server_gpus)] if launch.server_gpus > 1 else []
    return ["serve", "--engine", engine, *_cpu(config), "--restarts", "3", *named, *shards, *launch.server_flags]


def _log(config: Config, role: str, number: int, host: str) -> list[str]:
    """Where others reach it, it is a file that only its user reads, since there may be a key in it."""
    return ["--log", str(log_of(config, role, number))] if is_loopback(host) else []


def _cpu(config: Config) -> list[str]:
    return [] if config.launch.server_gpus else ["--cpu"]


def _workers(servers: Sequence[str]) -> list[str]:
    return ["--worker-urls", *(_url("server", host, number) for number, host in enumerate(servers))]


def _hosted(config: Config) -> list[str]:
    """Names of the environments that hosts have to know."""
    return list(dict.fromkeys(part.env["name"] for part in by_part(config).values()))


def _connected(config: Config, hosts: Mapping[str, Sequence[str]]) -> list[str]:
    """The keys that tell the trainer where the others are."""
    keys = []
    if servers := hosts.get("server"):
        urls = [_url("server", host, number) for number, host in enumerate(servers)]
        keys.append(f"inference.url={json.dumps(urls)}")
    if routers := hosts.get("router"):
        keys.append(f"inference.router=http://{address('router', routers[0], 0)}")
    if env_hosts := hosts.get("env"):
        found = json.dumps([address("env", host, number) for number, host in enumerate(env_hosts)])
        own = [f"parts.{name}.env.remote" for name, part in config.parts.items() if "env" in part]
        keys += [f"{key}={found}" for key in ("env.remote", *own)]
    return keys


def _ranks(config: Config, number: int, trainers: Sequence[str]) -> list[str]:
    words = ["--nproc", str(config.launch.nproc), "--nnodes", str(len(trainers)), "--restarts", "3"]
    if len(trainers) == 1:
        return words
    return [*words, "--node-rank", str(number), "--rendezvous", address("trainer", trainers[0], 0)]


def _secrets(config: Config, role: str) -> tuple[str, ...]:
    """What a role's process has to know, or to ask for."""
    wanted = {SERVER_KEY: ("server", "router"), ENV_TOKEN: ("env",)}
    there = {SERVER_KEY: config.launch.servers, ENV_TOKEN: config.launch.env_hosts}
    return tuple(key for key, asking in wanted.items() if there[key] and role in ("trainer", *asking))


def _check(config: Config, here: bool) -> None:
    """Refuse roles that do not go together."""
    launch, engine = config.launch, config.inference["name"]
    if launch.servers and engine == "local":
        raise ConfigError(
            f"launch.servers={launch.servers} is not accepted with inference.name='local', which is in the trainer's "
            "process. Accepted: 0; or set inference.name=sglang."
        )
    if launch.router and (engine != "sglang" or not launch.servers):
        raise ConfigError(
            "launch.router=true is not accepted without SGLang servers to start. Set inference.name=sglang "
            "and launch.servers."
        )
    if here and launch.nodes > 1:
        raise ConfigError(
            f"launch.nodes={launch.nodes} is not accepted on this machine alone. Accepted: 1; or --on ssh, ..."
        )
    if not here:
        _check_apart(config)


def _check_apart(config: Config) -> None:
    """Refuse what only works on one machine, and keys that would end up in files."""
    if config.launch.servers and config.inference["name"] == "vllm":
        raise ConfigError(
            "inference.name='vllm' with launch.servers is not accepted on other machines: a vLLM server checks no key, so "
            "it serves its own machine only. Accepted: inference.name=sglang; or --on local."
        )
    if config.launch.servers and config.inference.get("cohost"):
        raise ConfigError("inference.cohost=true is not accepted on other machines: they share a GPU. Accepted: --on local.")
    _refuse_secrets(config)


def _refuse_secrets(config: Config) -> None:
    """Keys that the configuration holds would be in the files that are written."""
    shown = flatten(redacted(asdict(config)))
    hidden = sorted(key for key, value in flatten(config).items() if value and shown.get(key) != value)
    if hidden:
        raise ConfigError(
            f"{hidden[0]} holds a key or a password, which would be written into files. Next: leave it out, and set the "
            f"environment variable {SERVER_KEY} for servers and {ENV_TOKEN} for hosts; other keys are taken from the "
            "variable that `api_key_env` names."
        )
