"""The layout of reasoning and answer: right or not, nothing between."""

import pytest

from rl4llm.core.base_env import ChatMessage, SampleState
from rl4llm.rewards.format import FormatReward
from rl4llm.rewards.scoring import check_examples


def grade(reply, **options):
    return FormatReward(**options)([ChatMessage("assistant", reply)], None)


@pytest.mark.parametrize(
    "reply",
    [
        "<think>a</think><answer>b</answer>",
        "\n <think>\na < b > c\n</think>\n\n<answer>\nb\n</answer> \n",
        "<think>a<thinking></think><answer>b <b>bold</b></answer>",
    ],
)
def test_the_layout_is_recognised_with_white_space_around_it(reply):
    assert grade(reply) == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "<answer>b</answer>",
        "<think>a</think><answer>b",
        "a<think>a</think><answer>b</answer>",
        "<think>a</think> so <answer>b</answer>",
        "<think>a</think><answer>b</answer> so",
        "<think>a</think><think>a</think><answer>b</answer>",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think><think>a</think></think><answer>b</answer>",
        "<think>a</think><answer>b<think></answer>",
        "<think></think><answer>b</answer>",
        "<THINK>a</THINK><answer>b</answer>",
        "a</think><answer>b</answer>",
    ],
)
def test_every_departure_from_the_layout_scores_zero(reply):
    assert grade(reply) == 0.0


def test_think_opened_expects_no_opening_tag_in_the_reply():
    assert grade("a</think><answer>b</answer>", think_opened=True) == 1.0
    assert grade("<think>a</think><answer>b</answer>", think_opened=True) == 0.0


def test_plain_text_may_be_the_answer():
    assert grade("<think>a</think> b", answer="") == 1.0
    assert grade("<think>a</think> ", answer="") == 0.0
    assert grade("<think>a</think> b <think>c</think>", answer="") == 0.0


def test_tags_and_score_are_options():
    assert grade("<plan>a</plan><code>b</code>", think="plan", answer="code", score=0.5) == 0.5
    assert grade("<a.b>a</a.b><a.b>d</a.b>", think="a.b", answer="a.b") == 1.0
    assert grade("<plan>a</plan><code>b</code>", think="<plan>", answer="<code>") == 1.0
    assert grade("<aXb>a</aXb><c>d</c>", think="a.b", answer="c") == 0.0


def test_only_the_last_reply_of_the_policy_counts():
    right, wrong = (
        ChatMessage("assistant", "<think>a</think><answer>b</answer>"),
        ChatMessage("assistant", "b"),
    )
    user = ChatMessage("user", "?")
    samples = [
        SampleState("p", 0, [user, wrong, user, right], None, init_msg_size=1),
        SampleState("p", 1, [user, right, user, wrong], None, init_msg_size=1),
        SampleState("p", 2, [user, right, user], None, init_msg_size=3),
    ]
    assert FormatReward().score_batch(samples) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "options", [{}, {"think_opened": True}, {"answer": ""}, {"score": 0.2, "think": "plan"}]
)
def test_the_examples_hold(options):
    check_examples([FormatReward(**options)])
