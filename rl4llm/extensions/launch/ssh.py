"""Machines reached by ssh: a script that starts each process through a separate connection.

Options: `hosts`, a file with a line for each machine, its name and its roles, such as ``node3 server=4 env``; `setup`,
a shell command that makes `rl4llm` available on a machine. A name may also be ``user@node3``; the others reach the
machine by the part after @. When the script or a connection ends, the processes started through it are stopped.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch.job import Assignment, ClusterJob, places
from rl4llm.extensions.launch.roles import hosts_variable

SCRIPT = "launch.sh"
SUBMIT = ("bash", SCRIPT)
OPTIONS = ("hosts", "setup")

REMOTE = """\
# On the other machine: secrets come through standard input, which no process list shows; its end ends the process.
exec 3<&0
for name in $1; do IFS= read -r "$name" <&3; export "$name"; done
"${@:2}" < /dev/null 3<&- &
child=$!
{ while read -r _ <&3; do :; done; kill -TERM "$child"; } 2> /dev/null &
guard=$!
code=0
wait "$child" || code=$?
kill "$guard" 2> /dev/null || true
exit "$code"
"""
START = """\
tail --pid=$$ -f /dev/null & trains=$!  # the connections of one kind live as long as these
tail --pid=$$ -f /dev/null & serves=$!
start() {  # start LIFE HOST COMMAND SECRET...
  ssh -o BatchMode=yes -o ServerAliveInterval=15 "$2" "bash -c $remote - '${*:4}' $3" < <(
    for name in "${@:4}"; do printf '%s\\n' "${!name}"; done
    exec tail --pid="$1" -f /dev/null
  ) &
}
trap 'kill "$trains" 2> /dev/null || true' INT TERM  # the trainer ends its step, saves and exits with code 75
trainers=()
"""
END = """\
code=0
wait "${trainers[0]}" || code=$?
while kill -0 "${trainers[0]}" 2> /dev/null; do code=0; wait "${trainers[0]}" || code=$?; done
trap '' INT TERM
[ "$code" = 0 ] || kill "$trains" 2> /dev/null || true
wait "${trainers[@]}" || true
kill "$serves" "$trains" 2> /dev/null || true
wait || true
exit "$code"
"""


def render(job: ClusterJob) -> dict[str, str]:
    """Return the script. It exits with the trainer's exit code; 75 means that the run resumes when started again."""
    job.check_options(OPTIONS, "ssh")
    names, machines = read_hosts_file(Path(job.options.get("hosts", "")))
    found = places(machines, job.roles)
    known = [
        f"{hosts_variable(role.name)}={','.join(_hosts_of(role.name, names, found))}" for role in job.roles
    ]
    started = [(name, place) for name, machine in zip(names, found, strict=True) for place in machine]
    started.sort(key=lambda item: item[1].role.name != "trainer")  # the first trainer is the first of all
    lines = [
        "#!/usr/bin/env bash",
        "# Starts every process through ssh; Ctrl-C stops all of them.",
        "set -eu",
    ]
    begin = [f"cd {shlex.quote(str(job.directory))} || exit", *filter(None, [job.options.get("setup")])]
    remote = shlex.quote(shlex.quote("\n".join([*begin, REMOTE])))
    lines += [*job.secrets_are_set(), f"remote={remote}", START.rstrip()]
    for name, place in started:
        trains = place.role.name == "trainer"
        own = [f"{variable}={value}" for variable, value in place.environ().items()]
        words = [name, shlex.join(["env", *known, *own, *place.role.command]), *place.role.secrets]
        lines.append(f'start "${"trains" if trains else "serves"}" {shlex.join(words)}')
        lines += ["trainers+=($!)"] if trains else []
    return {SCRIPT: "\n".join([*lines, END])}


def read_hosts_file(path: Path) -> tuple[list[str], list[dict[str, int]]]:
    """Return the names of machines, and the number of processes per role on each. Raises ConfigError with the wrong
    line.

        >>> Path("hosts").write_text("node1 trainer  # the first\\nnode2 server=4 env\\n")
        44
        >>> read_hosts_file(Path("hosts"))
        (['node1', 'node2'], [{'trainer': 1}, {'server': 4, 'env': 1}])
    """
    if not path.is_file():
        raise ConfigError(
            f"--on ssh needs --option hosts=FILE, but {str(path)!r} is not a file. Next: write a line for each machine with "
            "its name and roles: node3 server=4 env."
        )
    names, machines = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        name, *given = line.partition("#")[0].split() or [""]
        counts = {role: count or "1" for role, _, count in (word.partition("=") for word in given)}
        if name and (
            name.startswith("-") or not counts or not all(count.isdecimal() for count in counts.values())
        ):
            raise ConfigError(
                f"{path}, line {number}: {line.strip()!r} is not accepted. Accepted: HOST ROLE[=COUNT] ..."
            )
        if name:
            names.append(name)
            machines.append({role: int(count) for role, count in counts.items()})
    return names, machines


def _hosts_of(role: str, names: Sequence[str], found: Sequence[Sequence[Assignment]]) -> list[str]:
    """Return the hosts of a role, by the names that the others use."""
    return [
        name.rpartition("@")[2]
        for name, machine in zip(names, found, strict=True)
        for place in machine
        if place.role.name == role
    ]
