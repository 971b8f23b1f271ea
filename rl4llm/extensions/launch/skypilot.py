"""SkyPilot: a task of identical nodes. Each starts the processes of its rank, and ends when the trainer has ended.

Options: `shared`, the mount point of a volume that all nodes see (``shared=/shared``), and `volume`, its name in
SkyPilot; `setup`, a shell command that installs `rl4llm` on a node (by default this version with pip, and SGLang in a
separate environment if there are servers). All others are fields of the task's `resources`, such as ``infra=kubernetes``,
``image_id=docker:IMAGE``, ``cpus=16+`` or ``memory=128+``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rl4llm import __version__
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch.job import Assignment, ClusterJob, places, spread
from rl4llm.extensions.launch.roles import GIB_OF_CPU, SGLANG, hosts_variable
from rl4llm.extensions.launch.yaml_text import yaml_of

TASK = "task.yaml"
SERVERS = "$HOME/sglang"  # the environment of SGLang, which needs another torch
OWN = ("accelerators",)
BEGIN = """\
set -euo pipefail
mapfile -t ips <<< "$SKYPILOT_NODE_IPS"
others=() trainer=
"""
END = """\
code=0
if [ -n "$trainer" ]; then
  trap 'kill -TERM "$trainer"' TERM INT
  wait "$trainer" || code=$?
  while kill -0 "$trainer" 2> /dev/null; do code=0; wait "$trainer" || code=$?; done
  [ "$SKYPILOT_NODE_RANK" != 0 ] || touch "$ended"
else
  while [ ! -e "$ended" ]; do sleep 5; done
fi
kill "${others[@]}" 2> /dev/null || true
wait || true
exit "$code"
"""


def render(job: ClusterJob) -> dict[str, str]:
    """Return the task. It contains the names of secrets; `sky launch` takes their values from the environment."""
    if not job.option("shared").startswith("/") or not job.option("volume"):
        raise ConfigError(
            "--on skypilot needs --option shared=/PATH, the directory that the nodes share for output.dir, and --option "
            "volume=NAME, the SkyPilot volume mounted there (`sky volumes apply`)."
        )
    machines = places(spread(job.roles), job.roles)
    trainer = job.roles[0]
    resources = {
        name: value for name, value in job.options.items() if name not in ("shared", "volume", "setup", *OWN)
    }
    needed = [sum(place.role.cpus for place in machine) for machine in machines]
    resources = {"cpus": f"{max(needed)}+", "memory": f"{max(needed) * GIB_OF_CPU}+", **resources}
    if trainer.gpus:
        resources["accelerators"] = (
            f"{_gpu(job)}:{max(sum(place.role.gpus for place in machine) for machine in machines)}"
        )
    task = {
        "name": job.name,
        "num_nodes": len(machines),
        "resources": resources,
        "volumes": {job.option("shared"): job.option("volume")},
        "workdir": ".",
        "secrets": dict.fromkeys(job.secrets),
        "setup": job.option("setup") or _setup(job),
        "run": _run(job, machines),
    }
    return {TASK: yaml_of([{name: value for name, value in task.items() if value}])}


def _setup(job: ClusterJob) -> str:
    """Return the commands that install what a node runs."""
    lines = ["set -e", f"pip install 'rl4llm=={__version__}'"]
    if any(role.name == "server" for role in job.roles):
        lines += [f"python -m venv {SERVERS}", f"{SERVERS}/bin/pip install '{SGLANG}'"]
    return "\n".join(lines)


def submit(job: ClusterJob) -> list[str]:
    return ["sky", "launch", "-y", "-d", *(word for name in job.secrets for word in ("--secret", name)), TASK]


def _gpu(job: ClusterJob) -> str:
    """Return the GPU type of all nodes."""
    kinds = {role.gpu for role in job.roles if role.gpus}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        raise ConfigError(
            "--on skypilot: all nodes of a task are identical. Next: set launch.gpu, such as H100, and remove "
            "launch.server_gpu."
        )
    return kind


def _run(job: ClusterJob, machines: Sequence[Sequence[Assignment]]) -> str:
    """Return the script, which is the same for all nodes."""
    lines = [BEGIN.rstrip()]
    if not job.option("setup") and any(role.name == "server" for role in job.roles):
        lines.append(f'export RL4LLM_SGLANG_PYTHON="{SERVERS}/bin/python"')
    for role in job.roles:
        ranks = [rank for rank, machine in enumerate(machines) for place in machine if place.role is role]
        lines.append(
            f'export {hosts_variable(role.name)}="{",".join(f"${{ips[{rank}]}}" for rank in ranks)}"'
        )
    lines.append(
        f'ended={shlex.quote(job.option("shared"))}/.ended-"$SKYPILOT_TASK_ID"  # made when the first trainer ends'
    )
    lines.append('case "$SKYPILOT_NODE_RANK" in')
    for rank, machine in enumerate(machines):
        lines += [f"  {rank})", *(f"    {_start(place)}" for place in machine), "    ;;"]
    return "\n".join([*lines, "esac", END])


def _start(place: Assignment) -> str:
    own = [f"{name}={value}" for name, value in place.environ().items()]
    noted = "trainer=$!" if place.role.name == "trainer" else "others+=($!)"
    return f"{shlex.join(['env', *own, *place.role.command])} & {noted}"
