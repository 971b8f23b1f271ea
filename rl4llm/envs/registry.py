"""The table of environments that `env.name` may name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl4llm.core.registry import Registry

if TYPE_CHECKING:  # reading the names does not import torch
    from rl4llm.core.base_env import BaseMDPEnv

ENVIRONMENTS: Registry[type[BaseMDPEnv]] = Registry(
    "env.name",
    "rl4llm.core.base_env:BaseMDPEnv",
    group="rl4llm.envs",
    table={
        "chat": "rl4llm.envs.chat:ChatEnv",
        "debate": "rl4llm.envs.debate:DebateEnv",
        "math": "rl4llm.envs.chat:ChatEnv",
        "roles": "rl4llm.envs.roles:RolesEnv",
        "tool": "rl4llm.envs.tool:ToolMDPEnv",
    },
)
register_env = ENVIRONMENTS.register
