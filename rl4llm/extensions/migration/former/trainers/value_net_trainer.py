"""Stand in for the module of this name: PPO with `algorithm.critic_warmup_steps` takes its place."""

from rl4llm.core.registry import lazy

__getattr__ = lazy(__name__, {})
