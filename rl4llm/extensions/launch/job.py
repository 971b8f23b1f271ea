"""The input of a launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl4llm.extensions.launch.roles import Role


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
