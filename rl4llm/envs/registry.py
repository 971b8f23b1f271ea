"""The table of environments that `env.name` may name."""

from __future__ import annotations

from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.registry import Registry

ENVIRONMENTS: Registry[type[BaseMDPEnv]] = Registry("env.name", BaseMDPEnv)
register_env = ENVIRONMENTS.register
