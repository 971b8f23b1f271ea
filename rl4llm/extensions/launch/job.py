"""The input of a launcher: the roles of a run, and the assignment of their processes to numbered machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl4llm.core.errors import ConfigError, unknown
from rl4llm.extensions.launch.roles import Role


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A run for a launcher to start.

    Args:
        name: lower-case letters, digits and "-", which all launchers accept.
        roles: those of the run, trainer first.
        directory: base of relative paths in the configuration, on every machine.
        options: the values of `--option KEY=VALUE`; each launcher's module lists its options.
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

    def secrets_are_set(self) -> list[str]:
        """Return lines that end a bash script at once if a secret is missing; its value is in no file."""
        return [f': "${{{name}:?must be set to a long random string}}"' for name in self.secrets]

    def check_options(self, known: Sequence[str], launcher: str) -> None:
        """Refuse options that the launcher does not know."""
        for name in self.options:
            if name not in known:
                raise ConfigError(unknown(f"--on {launcher}: --option", name, known))


@dataclass(frozen=True, slots=True)
class Assignment:
    """One process of a role on a machine: its number, and the GPUs that it may use, by number or by name."""

    role: Role
    number: int
    devices: tuple[int | str, ...] = ()

    def environ(self) -> dict[str, str]:
        """Return the variables that distinguish it from other processes; a process without GPUs sees none."""
        return {"RL4LLM_NUMBER": str(self.number), "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices))}


def places(machines: Sequence[Mapping[str, int]], roles: Sequence[Role]) -> list[list[Assignment]]:
    """Assign processes to machines, given the number per role on each. Numbers count over machines, GPUs per machine. Roles
    that share the trainer's GPUs begin at its first one.

    Raises ConfigError if the machines and the configuration ask for different numbers.
    """
    by_name, counts, found = (
        {role.name: role for role in roles},
        dict.fromkeys((role.name for role in roles), 0),
        [],
    )
    for machine in machines:
        here, device = [], 0
        for name, count in machine.items():
            if name not in by_name:
                raise ConfigError(unknown("a machine's role", name, by_name))
            role = by_name[name]
            device = 0 if role.shares_gpus else device
            for _ in range(count):
                here.append(Assignment(role, counts[name], tuple(range(device, device + role.gpus))))
                counts[name] += 1
                device += role.gpus
        found.append(here)
    for role in roles:
        if counts[role.name] != role.count:
            raise ConfigError(
                f"The machines have {counts[role.name]} place(s) for the role {role.name}, but the section `launch` asks "
                f"for {role.count}. Change one of them."
            )
    if any(sum(place.role.name == "trainer" for place in machine) > 1 for machine in found):
        raise ConfigError(
            "trainer=2 is not accepted for one machine: one trainer starts launch.nproc processes on its machine."
        )
    return found
