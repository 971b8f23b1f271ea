"""The input of a launcher."""

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
