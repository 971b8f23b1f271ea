"""One turn: a prompt, an answer, a reward."""

from __future__ import annotations

from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.envs.registry import register_env


@register_env("math")
@register_env("chat")
class ChatEnv(BaseMDPEnv):
    """The environment of single-turn tasks such as GSM8K: whatever the policy says first is its answer."""
