"""The contract of opponents: who plays a role of an episode in place of the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from rl4llm.core.registry import Registry
from rl4llm.core.types import ChatMessage, SamplingParams


class BaseOpponent(ABC):
    """Reads its role's side of the conversation and says the next line. What it says is context to everybody else."""

    reply_timeout_s: ClassVar[float | None] = 120.0  # of one line; None for one that has deadlines of its own

    @abstractmethod
    async def reply(self, messages: Sequence[ChatMessage], sampling_params: SamplingParams) -> str:
        """The next line of a conversation in which the opponent's own lines are the assistant's.

        `sampling_params` are those of the policy, but for the seed, from which everything random derives. Whatever it raises
        means that the episode is played again and then left out: nobody's fault is scored.
        """

    def check(self) -> None:
        """Raise ConfigError where it could not say a word; called once, before a run starts."""

    async def disconnect(self) -> None:
        """Close what belongs to the running event loop; the next reply opens it again."""

    def close(self) -> None:
        """Release everything."""


OPPONENTS: Registry[Callable[..., BaseOpponent]] = Registry("env.opponents.name")
"""Those that a configuration may name; ``package.module:function`` is a function of the messages that returns the line."""

register_opponent = OPPONENTS.register
"""``@register_opponent("name")`` on a class makes it available to configurations under that name."""
