"""A reward that a tiny model learns in a few steps."""

from rl4llm.core.base_env import BaseRewardFunction


class Vowels(BaseRewardFunction):
    """The share of vowels in what was said last."""

    def __init__(self, name="vowels", **kwargs):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        said = messages[-1].content.lower()
        return sum(letter in "aeiou" for letter in said) / max(len(said), 1)
