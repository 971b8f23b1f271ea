"""Where the final answer stands in what a model wrote."""

import pytest

from rl4llm.rewards.extract import after_thinking, boxed_answers, final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{18}.", "18"),
        ("\\boxed{17} or rather \\boxed{18}", "18"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed {18}", "18"),
        ("\\fbox{18}", "18"),
        ("\\boxed{\\boxed{18}}", "18"),
        ("\\boxed{18} and \\boxed{unfinished", "18"),
        ("\\boxed{}", None),
        ("\\boxed{unfinished", None),
        ("18", None),
    ],
)
def test_the_last_complete_box_counts(text, answer):
    assert final_answer(text, "boxed") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [("#### 18", "18"), ("#### 17\n#### 18\nDone.", "18"), ("####18 ", "18"), ("####", None), ("18", None)],
)
def test_hash_marks_announce_the_rest_of_their_line(text, answer):
    assert final_answer(text, "hash") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 18.", "18"),
        ("The answer is 18. Thank you.", "18"),
        ("Answer: 18", "18"),
        ("ANSWER:18", "18"),
        ("**Answer:** 18", "18"),
        ("Answer:\n\n**18**\n", "18"),
        ("The final answer is: $18$.", "18"),
        ("The final answer is $x^2$, as shown.", "x^2"),
        ("The answer is $18 per day.", "$18 per day"),
        ("The answer is 18, because 9 + 9 is 18.", "18"),
        ("The answer is 18 since there are two nines", "18"),
        ("The answer is 3, so 4 are left", "3"),
        ("The answers are 3, 4, and 5", "3, 4, and 5"),
        ("Answer: $5$ or $6$", "$5$ or $6$"),
        ("The answer is \\(18\\).", "18"),
        ("The answers are 3 and 5", "3 and 5"),
        ("The answer is 17. No, the answer is 18", "18"),
        ("The answer is 18. I hope this answers it.", "18"),
        ("The answer isn't 18", None),
        ("to answer 18 questions", None),
        ("The answer is", None),
    ],
)
def test_the_last_announced_answer_counts(text, answer):
    assert final_answer(text, "answer") == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 and 18.", "18"),
        ("costs $1,234.50!", "$1,234.50"),
        ("from 5-3", "3"),
        ("down to -3", "-3"),
        ("one of 3,4", "4"),
        ("about 1/2", "1/2"),
        ("50% of it", "50%"),
        ("none", None),
    ],
)
def test_the_last_number_is_read_whole(text, number):
    assert final_answer(text, "last_number") == number


def test_auto_prefers_box_then_hash_then_words_then_number():
    assert final_answer("the answer is 3\n#### 2\n\\boxed{1} 4") == "1"
    assert final_answer("the answer is 3\n#### 2\n 4") == "2"
    assert final_answer("the answer is 3\n 4") == "3"
    assert final_answer("maybe 4") == "4"
    assert final_answer("no number") is None


def test_reasoning_is_no_answer():
    assert final_answer("<think>\\boxed{17}</think> \\boxed{18}") == "18"
    assert final_answer("\\boxed{17}</think> 18") == "18"
    assert final_answer("<think>\\boxed{17}, but") is None
    assert final_answer("<think>a</think>b<think>\\boxed{17}") is None
    assert after_thinking("plain") == "plain"


def test_an_answer_over_the_limit_stays_over_the_limit():
    boxes = ["\\boxed{" + "1" * 1000 + "}", "\\boxed{18" + " " * 1000 + "}"]
    for text in [*boxes, "#### " + "1" * 5000, "#### " + "1 " * 5000]:
        assert len(final_answer(text, max_chars=50)) > 50


@pytest.mark.parametrize(
    "unit", ["\\boxed{", "\\boxed{1}", "answer", "answer is ", "#### ", "1,", "<think>", "{", "$"]
)
def test_hostile_repetition_is_read_without_harm(unit):
    text = unit * (2_000_000 // len(unit))
    answer = final_answer(text)
    assert answer is None or len(answer) < 2000
    assert len(boxed_answers(text)) < 20_000
