"""Replies that are made to hurt: every reward that needs no server gives each of them a finite score, and soon."""

import math
import random
import signal

import pytest

from rl4llm.core.base_env import ChatMessage, SampleState
from rl4llm.core.types import TokenSpan
from rl4llm.rewards import as_reward_function
from rl4llm.rewards.math import MathReward
from rl4llm.rewards.scoring import score

REWARDS = [
    "math",
    "format",
    "tool_use",
    "repetition",
    {"name": "length", "max_length": 100, "unit": "chars"},
    {"name": "overlong", "max_length": 100, "buffer": 10},
    {"name": "gate", "reward": "format", "by": "math"},
]
REPLIES = {
    "lone surrogates": "\ud800 \\boxed{1\udfff8} ```python\nx = '\udc80'\n```",
    "2 MB of one letter": "x" * 2_000_000,
    "2 MB of boxes": "\\boxed{" * 285_714,
    "2 MB of answers": "The answer is 18. " * 111_111,
    "2 MB of tags": "<think>" * 285_714,
    "2 MB of marks": "#### " * 400_000,
    "2 MB of digits": "1" * 2_000_000,
    "2 MB of white space": " " * 2_000_000,
    "2 MB of fences": "```python\n" * 200_000,
    "2 MB of calls": "<tool_call>" * 180_000,
    "zero bytes": "\x00" * 1000 + "\\boxed{18\x00}",
    "nothing": "",
}


@pytest.fixture(scope="module", params=REWARDS, ids=str)
def reward(request):
    reward = as_reward_function(request.param)
    yield reward
    reward.close()


@pytest.mark.parametrize("name", REPLIES)
def test_a_hostile_reply_gets_a_finite_score(reward, name):
    sample = SampleState(
        "p", 0, [ChatMessage("user", "?"), ChatMessage("assistant", REPLIES[name])], "18", init_msg_size=1
    )
    sample.spans = [TokenSpan.context([1]), TokenSpan((2,) * 5000, "policy", (-1.0,) * 5000, 0)]
    earned = score([sample], [reward]).reward.item()
    assert sample.failure is None and math.isfinite(earned)
    assert earned == 0.0 or reward.name != "math" or "answers" in name


PIECES = (
    "1", "99", "1,000", ".", ",", "-", "+", "e", "^", "**", "!", "%", " " * 60, "\n", "=", "(", ")", "{", "}", "\\frac", "/",
    "*", "$", "\u00b0", "\u2079", "\u0663", "\u00bd", "of", "thousand", "three", "-three", "cm", "answer is", "'", "_",
    "and", "x",
)  # fmt: skip
FORMS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}.", "so 2 + 3 = {}")
LIMIT_S = 20  # of processor time, for what takes one


@pytest.mark.parametrize("extract", ["auto", "last_number"])
def test_no_text_keeps_the_reading_of_answers_busy(extract):
    """A policy at a high temperature writes such texts, and what reads them is in the trainer's process."""

    def stop(number, frame):
        raise AssertionError(f"Still reading: {text!r}")

    reward, draw = MathReward(extract=extract), random.Random(0)
    was = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        for _ in range(2000):
            pieces = draw.sample(PIECES, draw.randint(1, 4))
            text = draw.choice(FORMS).format("".join(draw.choices(pieces, k=draw.randint(1, 40))))
            reward._settle(text, "18")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, was)
        reward.close()
