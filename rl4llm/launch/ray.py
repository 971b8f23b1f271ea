"""Ray: a driver that keeps an actor for each process, in a placement group; an actor that dies is made again there.

``ray job submit`` runs ``python -m rl4llm.launch.ray config.yaml`` on the cluster. An actor only holds its process and tells
where it runs: tokens and weights never go through Ray. Options: `address` of the cluster's dashboard, else RAY_ADDRESS.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.core.supervise import SUPERVISE
from rl4llm.launch.job import Job
from rl4llm.launch.roles import NUMBER, Role, hosts_variable, roles

OPTIONS = ("address",)
RESTARTS = 3  # of an actor, and of what it holds
GRACE_S = 120.0  # for the step that runs, and a checkpoint
STOPPED = 75
PLACED_WITHIN_S = 600.0


def render(job: Job) -> dict[str, str]:
    """Nothing but the configuration: the driver is this module."""
    job.check_options(OPTIONS, "ray")
    return {}


def submit(job: Job) -> list[str]:
    address = ["--address", job.option("address")] if job.option("address") else []
    config = job.roles[0].command[2]
    return ["ray", "job", "submit", *address, "--no-wait", "--", "python", "-m", "rl4llm.launch.ray", config]


class Holder:
    """Holds one process of a run; the process ends when this actor does."""

    def host(self) -> str:
        """The address of this machine, for the others."""
        import ray  # noqa: PLC0415 - an extra

        return ray.util.get_node_ip_address()

    def hold(self, words: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run a command to its end; its exit code."""
        supervisor = [sys.executable, "-P", str(SUPERVISE), str(os.getpid()), str(GRACE_S)]
        return subprocess.run([*supervisor, *words], env={**os.environ, **environ}, check=False).returncode


def drive(config: str, words: Sequence[str] = (sys.executable, "-m", "rl4llm")) -> int:
    """Start every role of a configuration on the cluster, wait for the trainer; its exit code.

    Args:
        words: what calls rl4llm on the cluster's machines.
    """
    ray = _ray()
    wanted = roles(load_config(config), (*words, "launch", os.path.abspath(config)))
    missing = [name for role in wanted for name in role.secrets if not os.environ.get(name)]
    if missing:
        raise ConfigError(f"{missing[0]} is not set in the environment that Ray's machines were started with.")
    places = [(role, number) for role in wanted for number in range(role.count)]
    group = ray.util.placement_group([_bundle(role) for role, _ in places])
    ray.get(group.ready(), timeout=PLACED_WITHIN_S)
    try:
        holders = [_holder(ray, group, index, role) for index, (role, _) in enumerate(places)]
        hosts = ray.get([holder.host.remote() for holder in holders])
        known = {
            hosts_variable(role.name): ",".join(host for host, place in zip(hosts, places, strict=True) if place[0] is role)
            for role in wanted
        }
        secrets = {name: os.environ[name] for role in wanted for name in role.secrets}
        ends = {
            holder.hold.remote(list(role.command), {**_only(secrets, role), **known, NUMBER: str(number)}): (role, number)
            for holder, (role, number) in zip(holders, places, strict=True)
        }
        return _wait(ray, ends)
    finally:
        ray.util.remove_placement_group(group)  # which ends its actors, and they what they hold


def _wait(ray: Any, ends: dict[Any, tuple[Role, int]]) -> int:
    """The exit code of the first trainer, once all have ended; raises RuntimeError for another role that ended."""
    codes: dict[int, int] = {}
    while True:
        (ended,), _ = ray.wait(list(ends))
        role, number = ends.pop(ended)
        code = ray.get(ended)
        if role.name != "trainer":
            sys.stderr.write(f"{role.name} {number} ended with code {code}; the run is stopped.\n")
            return code or 1
        codes[number] = code
        if code or len(codes) == role.count:
            return code


def _holder(ray: Any, group: Any, index: int, role: Role) -> Any:
    """An actor in a bundle of its own; a killed one is made again there, and its process starts again."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
    resources = {"num_cpus": 1, "num_gpus": role.gpus, "max_restarts": RESTARTS, "max_task_retries": RESTARTS}
    return ray.remote(Holder).options(scheduling_strategy=strategy, **resources).remote()


def _bundle(role: Role) -> dict[str, float]:
    kind = {f"accelerator_type:{role.gpu}": 0.001} if role.gpu else {}
    return {"CPU": 1, **({"GPU": role.gpus, **kind} if role.gpus else {})}


def _only(secrets: Mapping[str, str], role: Role) -> dict[str, str]:
    return {name: value for name, value in secrets.items() if name in role.secrets}


def _ray() -> Any:
    try:
        import ray  # noqa: PLC0415 - an extra
        import ray.util.scheduling_strategies  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("--on ray needs Ray. Next: pip install 'rl4llm[ray]'.") from error
    ray.init(address="auto", log_to_driver=True)
    return ray


if __name__ == "__main__":
    sys.exit(drive(sys.argv[1]))
