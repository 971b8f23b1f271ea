"""Environments that hosts run, as a trainer sees them, and the environments that a host offers."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.backends.models import load_tokenizer
from rl4llm.compose.environments import (
    OF_TRAINER,
    Provided,
    check_env_options,
    make_env,
    make_prompts,
    make_rewards,
)
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction
from rl4llm.core.errors import ConfigError
from rl4llm.envs import ENVIRONMENTS
from rl4llm.extensions.remote.env import RemoteEnv, RemoteReward, RemoteRolesEnv
from rl4llm.extensions.remote.hosts import Hosts
from rl4llm.extensions.remote.token import read_token
from rl4llm.rewards import add, check_examples


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
            self._opened = self.hosts.open(self.name, self.options, specs, seed, row, Path(directory))
        return [
            RemoteReward(
                reward.name,
                reward.per_turn,
                reward.needs_ground_truth,
                reward.success_at if reward.HasField("success_at") else None,
            )
            for reward in self._opened.rewards
        ]

    def __call__(self, *args: Any, opponents: Any = None, **kwargs: Any) -> BaseMDPEnv:
        own: dict[str, Any] = {"hosts": self.hosts, "opened": self._opened, "name": self.name}
        if self._opened.roles:
            return RemoteRolesEnv(*args, opponents=opponents, **own, **kwargs)
        return RemoteEnv(*args, **own, **kwargs)

    def _prompts(self, split: str, limit: int | None = None) -> Sequence[Mapping[str, Any]]:
        return self.hosts.prompts(self.name, self.options, split, limit)


class Hosting:
    """The environments that a host offers and builds.

    Args:
        names: names of environments, registered ones or ``package.module:Class``.
        sandbox: creates the sandbox for programs of the policy; each trainer has a separate one, which ends with it.
    """

    def __init__(self, names: Sequence[str], sandbox: Callable[[], Any]):
        self.classes = {name: ENVIRONMENTS[name] for name in names}
        self._sandbox = sandbox

    def make(self, wanted: Any, tokenizer: Path) -> BaseMDPEnv:
        """Build an environment for one trainer. Raises an RL4LLMError if it cannot work."""
        check_env_options(self.classes[wanted.name], wanted.options)
        provided = Provided({"sandbox": self._sandbox})
        rewards = make_rewards(wanted.rewards, provided)
        check_examples(rewards)
        return make_env(
            self.classes[wanted.name],
            wanted.options,
            provided,
            dataset=[wanted.row],
            tokenizer=load_tokenizer(tokenizer),
            reward_functions=rewards,
            batch_size=1,
            group_size=1,
            seed=wanted.seed,
            reward_transform_fn=add,  # the trainer combines them
        )

    def prompts(
        self, name: str, options: Mapping[str, Any], split: str, limit: int | None
    ) -> Sequence[Mapping[str, Any]]:
        """Return the prompts that an environment brings."""
        if self.classes[name].prompts is None:
            raise ConfigError(f"The environment {name!r} has no prompts. Next: set data.path.")
        return make_prompts(self.classes[name], options, split, limit)


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
