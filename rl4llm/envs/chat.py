"""The environment of a single turn, which consists of a prompt, an answer and a reward."""

from __future__ import annotations

from rl4llm.core.base_env import BaseMDPEnv


class ChatEnv(BaseMDPEnv):
    """Play single-turn tasks such as GSM8K: the first turn of the policy is its answer."""

    default_rewards = ("math",)
