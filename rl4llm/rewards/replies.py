"""Select what the policy wrote in a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from rl4llm.core.base_env import SampleState
from rl4llm.core.types import ChatMessage


def policy_messages(sample: SampleState) -> list[ChatMessage]:
    """Return the assistant messages after the prompt; examples in a few-shot prompt are not the policy's."""
    return [message for message in sample.messages[sample.init_msg_size :] if message.role == "assistant"]


def final_reply(messages: Sequence[ChatMessage]) -> str:
    """Return the text of the last assistant message, "" without one."""
    return next((message.content for message in reversed(messages) if message.role == "assistant"), "")


def policy_tokens(sample: SampleState) -> int:
    """Return the number of tokens that the policy sampled, over all its turns."""
    return sum(len(span.token_ids) for span in sample.policy_spans)
