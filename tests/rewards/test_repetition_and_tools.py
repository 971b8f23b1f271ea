"""The repetition penalty and the tool-use reward are bounded, and text that imitates a tool call earns nothing."""

import pytest

from rl4llm.core.base_env import ChatMessage, SampleState
from rl4llm.core.errors import ConfigError, RewardError
from rl4llm.core.types import TokenSpan
from rl4llm.rewards import RepetitionPenalty, ToolUseReward, check_examples
from rl4llm.rewards.scoring import score

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>'


def said(*turns):
    """Return a sample of (text of the policy, answers of tools) per turn, after a prompt in which a tool was used.

    "!" marks the answer to a call that failed.
    """
    shown = [
        ChatMessage("user", "1+1?"),
        ChatMessage("assistant", CALL),
        ChatMessage("tool", "2"),
        ChatMessage("user", "?"),
    ]
    sample = SampleState("p", 0, shown, "85", init_msg_size=len(shown))
    for text, answers in turns:
        sample.messages += [
            ChatMessage("assistant", text),
            *(ChatMessage("tool", answer, failed=answer.startswith("!")) for answer in answers),
        ]
    return sample


def sampled(*turns):
    sample = said(*(("...", []) for _ in turns))
    for tokens in turns:
        sample.spans += [TokenSpan.context([1]), TokenSpan(tuple(tokens), "policy", (-1.0,) * len(tokens), 0)]
    return sample


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([("85", [])], 0.0),
        ([(CALL, ["85"]), ("85", [])], 1.0),
        ([(CALL, ["85"])] * 4, 1.0),
        ([(CALL, ["85", "85"]), (CALL, ["!no"]), ("85", [])], 2 / 3),
        ([(CALL, ["Error: disk full, says line 3 of the log"]), ("85", [])], 1.0),
        ([(CALL, ["85"])] * 5, 0.0),
        ([(CALL * 100, ["85"] * 4 + ["!at most 4 calls per turn"])], 0.0),
        ([(CALL * 100 + " Tool: 85 <tool_response>85</tool_response>", [])], 0.0),
    ],
)
def test_tool_use_counts_answered_calls_up_to_a_bound(turns, expected):
    assert score([said(*turns)], [ToolUseReward(max_calls=4)]).reward.tolist() == pytest.approx([expected])


def test_turns_share_the_tool_reward_by_successful_calls():
    sample = said((CALL, ["85", "!no"]), (CALL, ["85"]), ("85", []))
    scores = score([sample], [ToolUseReward(per_turn=True)])
    assert sample.turn_rewards == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 0.0})
    assert scores.rewards["tool_use"].tolist() == pytest.approx([2 / 3])


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([range(100)], 0.0),
        ([[5] * 101], -0.99),
        ([[1, 2, 3]], 0.0),
        ([[]], 0.0),
        ([range(50), range(50)], -49 / 99),
        ([[7, 8] * 50_000], -(1 - 2 / 99_999)),
    ],
)
def test_the_penalty_is_the_share_of_repeated_ngrams(turns, expected):
    penalty = RepetitionPenalty(n=2, allowed=0.0)
    assert score([sampled(*turns)], [penalty]).reward.tolist() == pytest.approx([expected])


def test_a_little_repetition_is_free_and_the_penalty_bounded():
    penalty = RepetitionPenalty(n=1, allowed=0.5, factor=2.0)
    assert [penalty.at([1, 2, 1, 2]), penalty.at([1, 1, 1, 2])] == [0.0, 0.0]
    assert penalty.at([1, 1, 1, 1]) == pytest.approx(-1.0)
    assert -2.0 < penalty.at([1] * 100_000) < -1.99


@pytest.mark.parametrize(
    "make",
    [
        lambda: RepetitionPenalty(),
        lambda: RepetitionPenalty(n=1, allowed=0.0, factor=3.0),
        lambda: ToolUseReward(),
        lambda: ToolUseReward(per_turn=True, max_calls=1),
    ],
)
def test_the_examples_hold(make):
    assert {0.0} != {example.score for example in make().examples() if not isinstance(example.score, list)}
    check_examples([make()])


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError):
        ToolUseReward(max_calls=0)
    for options in ({"n": 0}, {"allowed": 1.0}, {"factor": -1.0}):
        with pytest.raises(ConfigError):
            RepetitionPenalty(**options)
    with pytest.raises(RewardError):
        RepetitionPenalty()([ChatMessage("assistant", "a a a")], "")
