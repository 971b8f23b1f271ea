"""The reward of using tools and using them right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction, RewardExample, SampleState
from rl4llm.core.schema import Count, checked
from rl4llm.core.types import ChatMessage


class ToolUseReward(BaseRewardFunction):
    """The share of calls that worked, from 0.0 to 1.0; 0.0 without a call, or with more than `max_calls`.

    A call worked if the environment answered it and did not mark the answer as `failed`, whatever the text says. What the
    policy wrote never counts: text that looks like a call or like its result earns nothing. One call that works earns as
    much as many. So that a needless call earns nothing either, give it only with a right answer:
    ``{name: gate, reward: tool_use, by: math}``.

    Args:
        name: under which the score is logged.
        max_calls: more calls than this in an episode score 0.0.
        per_turn: whether each turn gets its part: of its calls that worked, over all calls of the episode.
    """

    needs_ground_truth = False

    @checked("rewards.{name}")
    def __init__(self, name: str = "tool_use", *, max_calls: Count = 8, per_turn: bool = False):
        super().__init__(name)
        self.max_calls = max_calls
        self.per_turn = per_turn

    def __call__(
        self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any
    ) -> float | list[float]:
        """Return the score of a conversation that begins where the policy's part does."""
        starts = [index for index, message in enumerate(messages) if message.role == "assistant"]
        turns = [  # of the policy, each with the tools' answers to it
            [message for message in messages[start:end] if message.role == "tool"]
            for start, end in pairwise([*starts, len(messages)])
        ]
        calls = sum(len(answers) for answers in turns)
        if not 0 < calls <= self.max_calls:
            shares = [0.0] * len(turns)
        else:
            shares = [sum(not answer.failed for answer in answers) / calls for answers in turns]
        return shares if self.per_turn else sum(shares)

    def score_batch(self, samples: Sequence[SampleState]) -> list[Any]:
        return [self(sample.messages[sample.init_msg_size :], sample.ground_truth) for sample in samples]

    def examples(self) -> Sequence[RewardExample]:
        """Return a call that worked, one that failed, and one that got no answer."""
        call = '{"name": "calculator", "arguments": {"expression": "37+48"}}'
        request = ChatMessage("assistant", f"<tool_call>{call}</tool_call>")
        answer = ChatMessage("assistant", "Tool: 85. The answer is 85.")
        cases = (
            ([request, ChatMessage("tool", "85"), answer], [1.0, 0.0]),
            ([request, ChatMessage("tool", "Error: no calculator", failed=True), answer], [0.0, 0.0]),
            ([request], [0.0]),
        )
        return [
            RewardExample(messages, "85", turns if self.per_turn else sum(turns)) for messages, turns in cases
        ]
