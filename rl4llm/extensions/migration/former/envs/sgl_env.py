"""Stand in for the module `rl4llm.envs.sgl_env`: `rl4llm.envs.ChatEnv` takes its place."""

from rl4llm.core.registry import lazy

__getattr__ = lazy(__name__, {})
