"""From names and options to environments and rewards: here, on hosts, and for a host."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, cast

from rl4llm.backends.models import load_tokenizer
from rl4llm.build.options import accepted_options, with_options
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.envs import ENVIRONMENTS
from rl4llm.rewards import add, as_reward_function, check_examples
from rl4llm.sandbox import Sandbox

NOT_OPTIONS = ("name", "remote", "reward_transform_fn")
"""Keys of ``env`` that no environment takes as its own option: they say what and where it is, or are the trainer's."""


def make_rewards(specs: Sequence[Any], sandbox: Sandbox) -> list[BaseRewardFunction]:
    """Rewards from names, and mappings of a name and options."""
    return [as_reward_function(spec, provided={"sandbox": sandbox}) for spec in specs]


def make_env(env_class: Any, options: Mapping[str, Any], provided: Mapping[str, Any], **fixed: Any) -> BaseMDPEnv:
    """An environment with a user's options, among them possibly those that are about its prompts alone.

    Of what is `provided` to all, such as the sandbox, it gets what it has a parameter for.
    """
    of_prompts = accepted_options(env_class.prompts) - accepted_options(env_class) if env_class.prompts else ()
    own = {name: value for name, value in options.items() if name not in (*NOT_OPTIONS, *of_prompts)}
    made = {name: item for name, item in provided.items() if name in accepted_options(env_class)}
    own = {name: value for name, value in own.items() if name not in made}
    return with_options("env", env_class, own, **fixed, **made)


def make_prompts(env_class: Any, options: Mapping[str, Any], split: str, limit: int | None) -> Sequence[Mapping[str, Any]]:
    """The prompts that an environment brings, by those of its options that are about them."""
    accepted = accepted_options(env_class.prompts)
    chosen = {name: value for name, value in options.items() if name in accepted}
    rows = with_options("env", env_class.prompts, chosen, split, limit)
    if not isinstance(rows, Sized):
        raise DataError(f"{env_class.__name__}.prompts must return a list of rows, not {rows!r:.100}.")
    return cast(Sequence[Mapping[str, Any]], rows)


class HostedEnvironment:
    """Stands for the class of an environment that hosts run, see `rl4llm.envs.remote`; hosts are asked at once.

    Args:
        options: ``env`` of a configuration: `name`, `remote` (host:port, or several) and what the environment takes.
    """

    def __init__(self, options: Mapping[str, Any]):
        from rl4llm.envs.remote.hosts import Hosts  # noqa: PLC0415 - gRPC is an extra
        from rl4llm.envs.remote.token import read_token  # noqa: PLC0415 - gRPC is an extra

        self.options = {name: value for name, value in options.items() if name not in NOT_OPTIONS}
        self.__name__ = self.__qualname__ = self.name = options["name"]
        self.hosts = Hosts(_addresses(options["remote"]), read_token(os.environ))
        offer = self.hosts.offer(self.name)
        self.default_rewards = json.loads(offer.default_rewards)
        self.prompts = self._prompts if offer.brings_prompts else None
        self._opened: Any = None

    def rewards(self, specs: Sequence[Any], tokenizer: Any, row: Mapping[str, Any], seed: int) -> list[BaseRewardFunction]:
        """Open the environment with these rewards; raises ConfigError when a host refuses one, or one of the options."""
        from rl4llm.envs.remote.env import RemoteReward  # noqa: PLC0415 - gRPC is an extra

        with tempfile.TemporaryDirectory(prefix="rl4llm-tokenizer-") as directory:
            tokenizer.save_pretrained(directory)
            self._opened = self.hosts.open(self.name, self.options, specs, seed, row, Path(directory))
        return [RemoteReward(reward.name, reward.per_turn) for reward in self._opened.rewards]

    def __call__(self, *args: Any, **kwargs: Any) -> BaseMDPEnv:
        from rl4llm.envs.remote.env import RemoteEnv  # noqa: PLC0415 - gRPC is an extra

        return RemoteEnv(*args, hosts=self.hosts, opened=self._opened, name=self.name, **kwargs)

    def _prompts(self, split: str, limit: int | None = None) -> Sequence[Mapping[str, Any]]:
        return self.hosts.prompts(self.name, self.options, split, limit)


class Hosting:
    """What a host offers and makes.

    Args:
        names: of environments, registered ones or ``package.module:Class``.
        sandbox: makes what programs of the policy run in; each trainer gets its own, which ends with it.
    """

    def __init__(self, names: Sequence[str], sandbox: Callable[[], Sandbox]):
        self.classes = {name: ENVIRONMENTS[name] for name in names}
        self._sandbox = sandbox

    def make(self, wanted: Any, tokenizer: Path) -> BaseMDPEnv:
        """An environment for one trainer; raises an RL4LLMError for what cannot work."""
        if len(self.classes[wanted.name].roles) > 1:
            raise ConfigError(f"env.name={wanted.name!r} has several roles, which hosts do not play. Leave env.remote out.")
        sandbox = self._sandbox()
        rewards = make_rewards(wanted.rewards, sandbox)
        check_examples(rewards)
        return make_env(
            self.classes[wanted.name],
            wanted.options,
            {"sandbox": sandbox},
            dataset=[wanted.row],
            tokenizer=load_tokenizer(tokenizer),
            reward_functions=rewards,
            batch_size=1,
            group_size=1,
            seed=wanted.seed,
            reward_transform_fn=add,  # the trainer weighs them
        )

    def prompts(
        self, name: str, options: Mapping[str, Any], split: str, limit: int | None
    ) -> Sequence[Mapping[str, Any]]:
        """The prompts that an environment brings."""
        if self.classes[name].prompts is None:
            raise ConfigError(f"The environment {name!r} brings no prompts. Set data.path.")
        return make_prompts(self.classes[name], options, split, limit)


def _addresses(remote: Any) -> list[str]:
    addresses = list(remote) if isinstance(remote, list | tuple) else [remote]
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"env.remote={address!r} is not accepted: host:port, or a list of them.")
    if not addresses or len(set(addresses)) < len(addresses):
        raise ConfigError(f"env.remote={addresses} is not accepted: host:port, or a list of different ones.")
    return addresses
