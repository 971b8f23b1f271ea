"""Slurm: a script for `sbatch`, in which each role with separate machines is a component of a heterogeneous job.

Options: `setup`, a shell command that makes `rl4llm` available on a node. All others are options of `sbatch` without
dashes (``partition=gpu``, ``time=12:00:00``, ``account=lab``), for all roles, or for one role as in
``server.cpus-per-task=16``. Without options about them, each GPU gets 8 processors, a process without GPUs gets 4, and a
processor 8 GiB of memory.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch.roles import GIB_OF_CPU, ClusterJob, Role, hosts_variable

SCRIPT = "job.sbatch"
SUBMIT = ("sbatch", SCRIPT)
CONFIG = ""
GRACE_S = 120  # before the time limit, to finish the current step and save a checkpoint
OPTION = re.compile(r"(?:(trainer|server|env)\.)?([a-z][a-z-]*)")
OF_CPUS = {"cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus"}
OF_MEMORY = {"mem", "mem-per-cpu", "mem-per-gpu", "exclusive"}
OF_SECTION = (
    "job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "gpus-per-task", "signal", "output", "chdir",
)  # fmt: skip

FUNCTIONS = """\
# The hosts of a component's tasks, in the order of their numbers.
hosts() { srun "$@" sh -c 'echo "$SLURM_PROCID $SLURMD_NODENAME"' | sort -n | cut -d ' ' -f 2 | paste -sd ,; }
# Runs a command in each task of a component; each task reads its number.
tasks() { exec srun "${@:2:$1}" --kill-on-bad-exit=0 sh -c 'RL4LLM_NUMBER=$SLURM_PROCID exec "$@"' - "${@:$1+2}"; }
"""
END = """\
# The trainer ends its step, saves and exits with code 75; a signal to srun itself would kill it.
trap 'scancel --signal=TERM "$(squeue -h -s -j "$SLURM_JOB_ID" -o "%i %j" | sed -n "s/ trainer$//p")"' TERM INT
code=0
wait "$trainer" || code=$?
while kill -0 "$trainer" 2> /dev/null; do code=0; wait "$trainer" || code=$?; done
trap '' TERM INT
kill "${others[@]}" 2> /dev/null || true
wait || true
exit "$code"
"""


def render(job: ClusterJob) -> dict[str, str]:
    """Return the script. It exits with the trainer's exit code; 75 means that the run resumes when submitted again."""
    for name in job.options:
        match = OPTION.fullmatch(name)
        if match is None or match[2] in OF_SECTION:
            raise ConfigError(
                f"--on slurm: --option {name} is not accepted. Accepted: an option of sbatch without dashes, except "
                f"{', '.join(OF_SECTION)}, which the section `launch` sets."
            )
    components = [role for role in job.roles if role.name != "router"]
    # a secret that is missing ends the script at once; its value is in no file
    secrets = [f': "${{{name}:?must be set to a long random string}}"' for name in job.secrets]
    lines = ["#!/usr/bin/env bash", *_head(job, components), "set -euo pipefail", *secrets]
    lines += [f"cd {shlex.quote(str(job.directory))}", job.options.get("setup", ""), FUNCTIONS.rstrip()]
    where = {role.name: _step(job, role, index, len(components)) for index, role in enumerate(components)}
    for role in components:
        lines.append(f'{hosts_variable(role.name)}="$(hosts {shlex.join(where[role.name])})"')
    if len(components) < len(job.roles):
        lines.append(f'{hosts_variable("router")}="${{{hosts_variable("trainer")}%%,*}}"')
    lines += [f"export {' '.join(hosts_variable(role.name) for role in job.roles)}", "others=()"]
    for role in job.roles[1:]:
        lines += [f"{_start(role, where)} &", "others+=($!)"]
    lines += [f"{_start(job.roles[0], where)} &", "trainer=$!", END]
    return {SCRIPT: "\n".join(lines)}


def _head(job: ClusterJob, components: Sequence[Role]) -> list[str]:
    lines = [
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --output={job.name}-%j.log",
        f"#SBATCH --signal=B:TERM@{GRACE_S}",
    ]
    for number, role in enumerate(components):
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH {word}" for word in _resources(job, role)]
    return lines


def _resources(job: ClusterJob, role: Role) -> list[str]:
    kind = f"{role.gpu}:" if role.gpu else ""
    if role.name == "trainer":
        words = [f"--nodes={role.count}", "--ntasks-per-node=1"]
        words += [f"--gpus-per-node={kind}{role.gpus}"] if role.gpus else []
    else:
        words = [f"--ntasks={role.count}", *([f"--gpus-per-task={kind}{role.gpus}"] if role.gpus else [])]
    return words + [f"--{name}={value}" for name, value in _options(job, role).items()]


def _options(job: ClusterJob, role: Role) -> dict[str, str]:
    """Return the `sbatch` options of a role: those given, with processors and memory if none of them is about these."""
    prefix, options = f"{role.name}.", {name: value for name, value in job.options.items() if "." not in name}
    options |= {name.removeprefix(prefix): job.options[name] for name in job.options if prefix in name}
    options.pop("setup", None)
    usual = {} if options.keys() & OF_CPUS else {"cpus-per-task": str(role.cpus)}
    usual |= {} if options.keys() & OF_MEMORY else {"mem-per-cpu": f"{GIB_OF_CPU}G"}
    return usual | options


def _step(job: ClusterJob, role: Role, index: int, components: int) -> list[str]:
    """Return the options that tell `srun` where a role's tasks are; it does not inherit the processors per task."""
    group = [f"--het-group={index}"] if components > 1 else []
    cpus = _options(job, role).get("cpus-per-task")
    return [*group, *([f"--cpus-per-task={cpus}"] if cpus else [])]


def _start(role: Role, where: dict[str, list[str]]) -> str:
    if role.name == "router":  # beside this script, on the first machine that trains
        return f"RL4LLM_NUMBER=0 {shlex.join(role.command)}"
    step = [*where[role.name], f"--job-name={role.name}"]
    return shlex.join(["tasks", str(len(step)), *step, *role.command])
