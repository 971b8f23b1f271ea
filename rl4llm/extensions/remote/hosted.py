"""What stands in a trainer for the class of an environment that hosts run."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.compose.environments import OF_TRAINER
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.remote import wire
from rl4llm.extensions.remote.env import RemoteEnv, RemoteReward, RemoteRolesEnv
from rl4llm.extensions.remote.hosts import Hosts
from rl4llm.extensions.remote.token import read_token


class HostedEnvironment:
    """Stands for the class of an environment that hosts run, see `rl4llm.extensions.remote`; it connects at once.

    Args:
        options: ``env`` of a configuration: `name`, `remote` (host:port, or several), `remote_ca` (the certificate file
            that TLS connections are verified with) and the options of the environment.
    """

    def __init__(self, options: Mapping[str, Any]):
        self.options = {name: value for name, value in options.items() if name not in OF_TRAINER}
        self.__name__ = self.__qualname__ = self.name = options["name"]
        authority = Path(str(options["remote_ca"])) if options.get("remote_ca") else None
        self.hosts = Hosts(_addresses(options["remote"]), read_token(os.environ), authority=authority)
        offer = self.hosts.offer(self.name)
        self.default_rewards = json.loads(offer.default_rewards)
        self.prompts = self._prompts if offer.brings_prompts else None
        if offer.has_roles:  # opponents take their turns in the trainer's process, as the policy does
            self.options.pop("opponents", None)
        self._opened: Any = None

    def rewards(
        self, specs: Sequence[Any], tokenizer: Any, row: Mapping[str, Any], seed: int
    ) -> list[BaseRewardFunction]:
        """Open the environment with these rewards. Raises ConfigError if a host refuses a reward or an option."""
        with tempfile.TemporaryDirectory(prefix="rl4llm-tokenizer-") as directory:
            tokenizer.save_pretrained(directory)
            files = {file.name: file.read_bytes() for file in Path(directory).iterdir() if file.is_file()}
        wanted = wire.OpenRequest(
            environment=self.name,
            options=self._options(),
            rewards=[wire.to_json(spec, "rewards: one of them") for spec in specs],
            seed=seed,
            row=wire.row_json(row, "data: its first row"),
            tokenizer=files,
        )
        self._opened = self.hosts.open(wanted)
        return [RemoteReward(reward) for reward in self._opened.rewards]

    def __call__(self, *args: Any, opponents: Any = None, **kwargs: Any) -> BaseMDPEnv:
        own: dict[str, Any] = {"hosts": self.hosts, "opened": self._opened, "name": self.name}
        if self._opened.roles:
            return RemoteRolesEnv(*args, opponents=opponents, **own, **kwargs)
        return RemoteEnv(*args, **own, **kwargs)

    def _prompts(self, split: str, limit: int | None = None) -> Sequence[Mapping[str, Any]]:
        wanted = {"environment": self.name, "options": self._options(), "split": split, "limit": limit}
        return self.hosts.prompts(wire.PromptsRequest(**wanted))

    def _options(self) -> str:
        return wire.to_json(self.options, "env: its options")


def _addresses(remote: Any) -> list[str]:
    addresses = list(remote) if isinstance(remote, list | tuple) else [remote]
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"env.remote={address!r} is not accepted. Accepted: host:port, or a list of them."
            )
    if not addresses or len(set(addresses)) < len(addresses):
        raise ConfigError(
            f"env.remote={addresses} is not accepted. Accepted: host:port, or a list of different ones."
        )
    return addresses
