"""Ray: a driver that runs an actor for each process in a placement group; an actor that dies is recreated there.

``ray job submit`` runs ``python -m rl4llm.extensions.launch.ray config.yaml DIRECTORY`` on the cluster. Every process works
in DIRECTORY, where the job was submitted, so relative paths and modules mean the same there. An actor only runs its
process and reports its address: tokens and weights never go through Ray. Option: `address` of the cluster's dashboard
(default: RAY_ADDRESS).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError, RL4LLMError
from rl4llm.extensions.launch.job import ClusterJob
from rl4llm.extensions.launch.roles import NUMBER, Role, hosts_variable, roles
from rl4llm.runtime.supervise import SUPERVISE
from rl4llm.runtime.terminal import visible
from rl4llm.runtime.watchdog import stop_signals

OPTIONS = ("address",)
RESTARTS = 3  # of an actor and its process
GRACE_S = 120.0  # to finish the current step and save a checkpoint
STOPPED = 75
PLACED_WITHIN_S = 600.0
SAY_EVERY_S = 10.0
LOOK_S = 0.5


def render(job: ClusterJob) -> dict[str, str]:
    """Return no files besides the configuration: the driver is this module."""
    job.check_options(OPTIONS, "ray")
    return {}


def submit(job: ClusterJob) -> list[str]:
    address = ["--address", job.option("address")] if job.option("address") else []
    config = job.roles[0].command[2]
    return [
        "ray",
        "job",
        "submit",
        *address,
        "--no-wait",
        "--",
        "python",
        "-m",
        "rl4llm.extensions.launch.ray",
        config,
        str(job.directory),
    ]


class Holder:
    """Runs one process of the run; the process ends when this actor ends or `stop` is called."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def host(self) -> str:
        """Return the address of this machine for the others."""
        import ray  # noqa: PLC0415 - an extra

        return ray.util.get_node_ip_address()

    def hold(self, words: Sequence[str], environ: Mapping[str, str], directory: str) -> int:
        """Run a command in a directory to its end and return its exit code."""
        supervisor = [sys.executable, "-P", str(SUPERVISE), str(os.getpid()), str(GRACE_S)]
        self._process = subprocess.Popen([*supervisor, *words], env={**os.environ, **environ}, cwd=directory)
        return self._process.wait()

    def stop(self) -> None:
        """Ask the command to end, which makes `hold` return."""
        if self._process is not None:
            self._process.terminate()


def drive(config: str, words: Sequence[str] = (sys.executable, "-m", "rl4llm")) -> int:
    """Start every role of a configuration on the cluster, wait for the trainer and return its exit code.

    Args:
        words: the command for rl4llm on the cluster's machines.
    """
    ray = _ray()
    wanted = roles(load_config(config), (*words, "launch", os.path.abspath(config)))
    missing = [name for role in wanted for name in role.secrets if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{missing[0]} is not set in the environment of the Ray cluster. Next: set it where `ray start` runs."
        )
    places = [(role, number) for role in wanted for number in range(role.count)]
    group = ray.util.placement_group([_bundle(role) for role, _ in places])
    try:
        _wait_for_room(ray, group, [_bundle(role) for role, _ in places])
        holders = [_holder(ray, group, index, role) for index, (role, _) in enumerate(places)]
        hosts = ray.get([holder.host.remote() for holder in holders])
        known = {
            hosts_variable(role.name): ",".join(
                host for host, place in zip(hosts, places, strict=True) if place[0] is role
            )
            for role in wanted
        }
        secrets = {name: os.environ[name] for role in wanted for name in role.secrets}
        ends = {
            holder.hold.remote(
                list(role.command), {**_only(secrets, role), **known, NUMBER: str(number)}, os.getcwd()
            ): (
                role,
                number,
            )
            for holder, (role, number) in zip(holders, places, strict=True)
        }
        trainers = [
            holder for holder, (role, _) in zip(holders, places, strict=True) if role.name == "trainer"
        ]
        return _wait(ray, ends, trainers)
    finally:
        ray.util.remove_placement_group(group)  # ends its actors, which end their processes


def _wait_for_room(ray: Any, group: Any, bundles: Sequence[Mapping[str, float]]) -> None:
    """Wait until the cluster has room for all processes; it may grow meanwhile. Raises ConfigError after a timeout."""
    wanted = {name: sum(bundle.get(name, 0) for bundle in bundles) for bundle in bundles for name in bundle}
    begin = time.monotonic()
    while not group.wait(min(SAY_EVERY_S, PLACED_WITHIN_S)):
        there, free = ray.cluster_resources(), ray.available_resources()
        lacking = ", ".join(
            f"{name}: {count:g} requested, {there.get(name, 0):g} in the cluster, {free.get(name, 0):g} free"
            for name, count in wanted.items()
        )
        waited_s = time.monotonic() - begin
        sys.stderr.write(f"Waiting {waited_s:.0f} s for room in the cluster ({lacking}).\n")
        if waited_s >= PLACED_WITHIN_S:
            raise ConfigError(
                f"The Ray cluster had no room within {PLACED_WITHIN_S:g} s ({lacking}); each process needs one machine. "
                "Next: add machines, end other jobs, or lower launch.servers, launch.nproc or launch.nodes."
            )


def _wait(ray: Any, ends: dict[Any, tuple[Role, int]], trainers: Sequence[Any]) -> int:
    """Return the exit code of the first trainer once all have ended, or of another role that ended first.

    Ctrl-C, SIGTERM and SIGHUP are passed on to the trainers, which save.
    """
    codes: dict[int, int] = {}
    stopped = threading.Event()
    with stop_signals(lambda *_: stopped.set()):
        while True:
            ended, _ = ray.wait(list(ends), timeout=LOOK_S)
            if stopped.is_set():
                stopped.clear()
                ray.get([trainer.stop.remote() for trainer in trainers])
            for end in ended:
                role, number = ends.pop(end)
                code = ray.get(end)
                if role.name != "trainer":
                    sys.stderr.write(f"{role.name} {number} exited with code {code}; stopping the run.\n")
                    return code or 1
                codes[number] = code
                if (code and code != STOPPED) or len(codes) == role.count:
                    return code


def _holder(ray: Any, group: Any, index: int, role: Role) -> Any:
    """Create an actor in a separate bundle; if it is killed, it is recreated there and its process restarts."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
    resources = {"num_cpus": 1, "num_gpus": role.gpus, "max_restarts": RESTARTS, "max_task_retries": RESTARTS}
    resources["max_concurrency"] = 2  # `stop` is called while `hold` runs
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
        raise ConfigError("--on ray needs the package ray. Next: pip install 'rl4llm[ray]'.") from error
    ray.init(address="auto", log_to_driver=True)
    return ray


def main() -> int:
    """Run as a job of the cluster; errors are printed as lines, like on the command line."""
    try:
        os.chdir(sys.argv[2])
        return drive(sys.argv[1])
    except OSError as error:
        said = f"{error}. Next: use a directory that all machines of the cluster see under the same path."
        sys.stderr.write(visible(said) + "\n")
        return 2
    except RL4LLMError as error:
        sys.stderr.write(visible(f"{type(error).__name__}: {error}") + "\n")
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
