"""The reward of keeping to a layout: reasoning in one tag, the answer in another."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rl4llm.core.base_env import RewardExample, SampleState
from rl4llm.core.base_reward import BaseBatchReward, final_reply, policy_messages
from rl4llm.core.types import ChatMessage


class FormatReward(BaseBatchReward):
    """`score` when the last reply is exactly ``<think>...</think><answer>...</answer>``, else 0.0.

    Each of the four tags occurs once, in this order, with something between opening and closing; around and between the
    two blocks there is nothing but white space.

    Args:
        name: under which the score is logged.
        think: name of the tag around the reasoning.
        answer: name of the tag around the answer; "" when plain text after the reasoning is the answer.
        score: what a reply in the right layout gets.
        think_opened: whether the chat template already wrote the opening tag of the reasoning.
    """

    needs_ground_truth = False

    def __init__(
        self,
        name: str = "format",
        *,
        think: str = "think",
        answer: str = "answer",
        score: float = 1.0,
        think_opened: bool = False,
    ):
        super().__init__(name)
        self.think = think.strip("<>")
        self.answer = answer.strip("<>")
        self.score = float(score)
        self.think_opened = think_opened

    def score_batch(self, samples: Sequence[SampleState]) -> list[float]:
        replies = (final_reply(policy_messages(sample)) for sample in samples)
        return [self.score if self._holds(reply) else 0.0 for reply in replies]

    def examples(self) -> Sequence[RewardExample]:
        """Return a reply in the right layout, and one without the reasoning."""
        opening = "" if self.think_opened else f"<{self.think}>"
        answer = f"<{self.answer}>4</{self.answer}>" if self.answer else "4"
        texts = ((f"{opening}2 and 2\n</{self.think}>\n{answer}", self.score), (answer, 0.0))
        return [RewardExample([ChatMessage("assistant", text)], "4", score) for text, score in texts]

    def _holds(self, reply: str) -> bool:
        think, tag = re.escape(self.think), re.escape(self.answer)
        tags = "|".join(filter(None, (think, tag)))
        inside = rf"(?=\s*+[^<\s]|\s*+<(?!/?(?:{tags})>))(?:(?!</?(?:{tags})>).)++"
        answer = rf"\s*<{tag}>{inside}</{tag}>" if tag else inside
        opening = "" if self.think_opened else rf"\s*<{think}>"
        return re.fullmatch(rf"{opening}{inside}</{think}>{answer}\s*", reply, re.DOTALL) is not None
