"""From the configuration to those who play a role in place of the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.build.data import environment_of
from rl4llm.build.models import device_of
from rl4llm.build.options import Given, accepted_options, with_options
from rl4llm.config import Config
from rl4llm.core.base_opponent import OPPONENTS, register_opponent
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import WeightRef
from rl4llm.inference.local import LocalClient
from rl4llm.inference.opponent import EngineOpponent, ServerOpponent

THE_POLICY = "policy"

register_opponent("server")(ServerOpponent)


@register_opponent("model")
def opponent_model(path: str, *, dtype: str = "float32", device: str = "cpu") -> EngineOpponent:
    """A model from disk or the hub, in an engine of its own in this process, whose weights stay as they are."""
    tokenizer = load_tokenizer(path)
    client = LocalClient(load_model(path, dtype, device), tokenizer)
    asyncio.run(client.load(WeightRef(0)))
    return EngineOpponent(client, tokenizer)


def build_opponents(config: Config, given: Given) -> dict[str, Any] | None:
    """Who plays which role; None where nothing is said about it, and the environment's own opponents play."""
    chosen = config.env.get("opponents")
    if chosen is None or "opponents" not in accepted_options(environment_of(config, given)):
        return None
    if not isinstance(chosen, Mapping):
        raise ConfigError(f"env.opponents={chosen!r:.200} is not accepted: a mapping by role.")
    return {role: _opponent(config, role, item) for role, item in chosen.items() if item not in (None, THE_POLICY)}


def _opponent(config: Config, role: str, item: Any) -> Any:
    if not isinstance(item, str | Mapping):
        raise ConfigError(
            f"env.opponents.{role}={item!r:.200} is not accepted: {THE_POLICY!r}, 'package.module:function', or a mapping "
            f"with name ({', '.join(OPPONENTS)}) and options."
        )
    options = {"name": item} if isinstance(item, str) else {"name": "server", **item}
    name = options.pop("name")
    made = OPPONENTS[name]
    if name not in OPPONENTS and not isinstance(made, type):
        return made  # a function of the messages
    ours = {"dtype": config.model.dtype, "device": device_of(config)}
    fixed = {name: value for name, value in ours.items() if name in accepted_options(made)}
    return with_options(f"env.opponents.{role}", made, options, **fixed)
