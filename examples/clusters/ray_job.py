"""Ray: a job that starts one process that trains and the inference servers, each as a task with its GPUs.

Copy this file next to config.yaml, in a directory that all machines of the cluster see under the same path, and run there:

    export RL4LLM_SERVER_KEY=$(openssl rand -hex 32)        # before `ray start`, on every machine
    ray job submit --no-wait -- python "$PWD/ray_job.py" "$PWD/config.yaml"
"""

import os
import subprocess
import sys

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl4llm.config import load_config
from rl4llm.runtime.supervise import supervised

CPUS = 8  # of each process


def bundle(gpus: int) -> dict[str, float]:
    return {"CPU": CPUS, **({"GPU": gpus} if gpus else {})}


@ray.remote(num_cpus=0)
def address() -> str:
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=3)  # the trainer resumes from its last checkpoint
def start(config: str, role: str, environ: dict[str, str]) -> None:
    command = [sys.executable, "-m", "rl4llm", "launch", config, "--as", role]
    ends_with_this_task = supervised(command, 120)
    everything = {**os.environ, **environ}
    subprocess.run(ends_with_this_task, check=True, cwd=os.path.dirname(config), env=everything)


def main(config: str) -> None:
    launch = load_config(config).launch
    bundles = [bundle(launch.nproc), *(bundle(launch.server_gpus) for _ in range(launch.servers))]
    ray.init(address="auto")
    group = ray.util.placement_group(bundles)
    ray.get(group.ready())
    at = [PlacementGroupSchedulingStrategy(group, index) for index in range(len(bundles))]
    hosts = ray.get([address.options(scheduling_strategy=place).remote() for place in at])
    # each server takes the port of its number, so several fit on one machine
    known = {"RL4LLM_TRAINER_HOSTS": hosts[0], "RL4LLM_SERVER_HOSTS": ",".join(hosts[1:])}

    def begin(index: int, role: str, number: int) -> ray.ObjectRef:
        gpus = bundles[index].get("GPU", 0)
        chosen = start.options(num_cpus=CPUS, num_gpus=gpus, scheduling_strategy=at[index])
        return chosen.remote(config, role, {**known, "RL4LLM_NUMBER": str(number)})

    servers = [begin(1 + number, "server", number) for number in range(launch.servers)]
    trainer = begin(0, "trainer", 0)
    ray.get(ray.wait([trainer, *servers])[0])  # raises if a server ended first
    ray.util.remove_placement_group(group)


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
