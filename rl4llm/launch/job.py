"""What an engine is given to start: the roles of a run, and where they lie on machines that are told apart by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl4llm.core.errors import ConfigError, unknown
from rl4llm.launch.roles import Role


@dataclass(frozen=True, slots=True)
class Job:
    """A run for an engine to start.

    Args:
        name: lower-case letters, digits and "-", as all engines take it.
        roles: what it consists of, trainer first.
        directory: where relative paths of the configuration begin, on every machine.
        options: what `--option KEY=VALUE` gave; what an engine knows of is in its module.
    """

    name: str
    roles: Sequence[Role]
    directory: Path
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def secrets(self) -> list[str]:
        """Environment variables that must be set where the job is submitted."""
        return list(dict.fromkeys(name for role in self.roles for name in role.secrets))

    def option(self, name: str, default: str = "") -> str:
        return self.options.get(name, default)

    def check_options(self, known: Sequence[str], engine: str) -> None:
        """Refuse options that the engine does not know."""
        for name in self.options:
            if name not in known:
                raise ConfigError(unknown(f"--on {engine}: --option", name, known))


@dataclass(frozen=True, slots=True)
class Place:
    """One process of a role on a machine: its number, and the GPUs that it may use there."""

    role: Role
    number: int
    devices: tuple[int, ...] = ()

    def environ(self) -> dict[str, str]:
        """What tells it apart from the others. A process without GPUs sees none, whatever else runs there."""
        return {"RL4LLM_NUMBER": str(self.number), "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices))}


def places(machines: Sequence[Mapping[str, int]], roles: Sequence[Role]) -> list[list[Place]]:
    """What runs on each machine, given how many of each role do; numbers count over machines, GPUs on each of them."""
    by_name, counts, found = {role.name: role for role in roles}, dict.fromkeys((role.name for role in roles), 0), []
    for machine in machines:
        here, device = [], 0
        for name, count in machine.items():
            if name not in by_name:
                raise ConfigError(unknown("a machine's role", name, by_name))
            role = by_name[name]
            for _ in range(count):
                here.append(Place(role, counts[name], tuple(range(device, device + role.gpus))))
                counts[name] += 1
                device += role.gpus
        found.append(here)
    for role in roles:
        if counts[role.name] != role.count:
            raise ConfigError(
                f"{counts[role.name]} place(s) for the role {role.name}, and the configuration's section `launch` asks for "
                f"{role.count}. Change one of them."
            )
    if any(sum(place.role.name == "trainer" for place in machine) > 1 for machine in found):
        raise ConfigError("trainer=2 is not accepted for one machine: it trains with launch.nproc processes on each.")
    return found


def spread(roles: Sequence[Role]) -> list[dict[str, int]]:
    """Machines of one kind for these roles: those that train, then as many as the servers need; the rest is on the first."""
    by_name = {role.name: role for role in roles}
    trainer, server = by_name["trainer"], by_name.get("server")
    machines: list[dict[str, int]] = [{"trainer": 1} for _ in range(trainer.count)]
    if server is not None:
        each = max(1, trainer.gpus // server.gpus) if server.gpus else 1
        full, left = divmod(server.count, each)
        machines += [{"server": each} for _ in range(full)] + ([{"server": left}] if left else [])
    machines[0] |= {name: by_name[name].count for name in ("router", "env") if name in by_name}
    return machines
