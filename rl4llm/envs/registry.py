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
        "agent": "rl4llm.extensions.agents.env:AgentEnv",
        "chat": "rl4llm.envs.chat:ChatEnv",
        "code": "rl4llm.extensions.sandbox.code_env:CodeEnv",
        "debate": "rl4llm.envs.debate:DebateEnv",
        "gymnasium": "rl4llm.extensions.adapters.gymnasium:GymnasiumEnv",
        "math": "rl4llm.envs.chat:ChatEnv",
        "openenv": "rl4llm.extensions.adapters.openenv:OpenEnv",
        "reasoning_gym": "rl4llm.extensions.adapters.reasoning_gym:ReasoningGymEnv",
        "roles": "rl4llm.envs.roles:RolesEnv",
        "stepped": "rl4llm.extensions.adapters.stepped:SteppedEnv",
        "tool": "rl4llm.envs.tool:ToolMDPEnv",
        "verifiers": "rl4llm.extensions.adapters.verifiers:VerifiersEnv",
    },
)
register_env = ENVIRONMENTS.register
