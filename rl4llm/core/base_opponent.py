"""The contract of opponents: who plays a role of an episode in place of the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from rl4llm.core.types import ChatMessage, SamplingParams


class BaseOpponent(ABC):
    """Plays a role: it reads the conversation and returns the next line, which is context for all other roles."""

    reply_timeout_s: ClassVar[float | None] = 120.0  # of one line; None for one that has deadlines of its own

    @abstractmethod
    async def reply(self, messages: Sequence[ChatMessage], sampling_params: SamplingParams) -> str:
        """Return the next line of a conversation in which the opponent is the assistant.

        `sampling_params` are those of the policy except for the seed, which decides everything random. After an exception
        the episode is retried once and then left out, so that no failure counts as a reward.
        """

    def check(self) -> None:
        """Raise ConfigError if the opponent cannot reply; called once, before a run starts."""

    async def disconnect(self) -> None:
        """Close what belongs to the running event loop; the next reply opens it again."""

    def close(self) -> None:
        """Release everything."""
