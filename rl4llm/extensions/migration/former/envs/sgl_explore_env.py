"""Stand in for the module `rl4llm.envs.sgl_explore_env`: `algorithm.name=explore_grpo` takes its place."""

from rl4llm.core.registry import lazy

__getattr__ = lazy(__name__, {})
