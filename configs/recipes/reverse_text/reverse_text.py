"""The reward of a text that is to be written backwards."""

import re
from difflib import SequenceMatcher

from rl4llm import BaseRewardFunction

ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


class Reversed(BaseRewardFunction):
    """How similar the text in ``<reversed_text>`` is to the ground truth read backwards, from 0 to 1; 0 without the tags.

    The similarity is that of `difflib.SequenceMatcher`, as in the environment reverse-text of verifiers.
    """

    def __init__(self, name: str = "reversed"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **columns) -> float:
        found = ANSWER.search(messages[-1].content or "")
        return SequenceMatcher(None, found[1].strip(), str(ground_truth)[::-1]).ratio() if found else 0.0
