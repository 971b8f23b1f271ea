"""Where the final answer stands in what a model wrote."""

import itertools
import operator
import re

import pytest

from rl4llm.core.message import after_thinking
from rl4llm.rewards import marks
from rl4llm.rewards.extract import boxed_answers, final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{18}.", "18"), ("\\boxed{17} or rather \\boxed{18}", "18"), ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"), ("\\boxed {18}", "18"), ("\\fbox{18}", "18"),
        ("\\boxed{\\boxed{18}}", "18"), ("\\boxed 5", "5"), ("\\boxed{5}\n\n\\boxed{5}", "5"),
        ("$x=\\boxed{1}$ and $x=\\boxed{-2}$", "1, -2"),
        ("\\boxed{(2, 2)} \\quad \\text{and} \\quad \\boxed{(6, 2)}", "(2, 2), (6, 2)"),
        ("\\boxed{1} papers and \\boxed{2} bins", "1, 2"), ("First \\boxed{3}. Then \\boxed{7}", "7"),
        ("\\boxed{3}, which is not \\boxed{4} and so \\boxed{7}", "7"), ("\\boxed{18} and \\boxed{unfinished", None),
        ("\\boxed{18}, no: \\boxed{}", None), ("\\boxed{18}, no: \\boxed{\\frac{5}{", None), ("\\framebox{18} cm", "18"),
        ("\\boxed 12", "12"), ("\\boxed{\\text{Answer: } 12}", "12"), ("\\boxed{}", None), ("\\boxed{unfinished", None),
        ("18", None),
    ],
)  # fmt: skip
def test_the_last_box_counts_unless_it_is_unfinished(text, answer):
    assert final_answer(text, "boxed") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 18", "18"), ("#### 17\n#### 18\nDone.", "18"), ("#### $18 a day\n\nDone.", "$18 a day"),
        ("#### Tuesday\n\nDone.", "Tuesday"), ("#### Step 2: add\nSo 17.", None), ("#### Answer\n17", None),
        ("####18 ", "18"), ("####", None), ("18", None),
    ],
)  # fmt: skip
def test_hash_marks_announce_the_rest_of_their_line(text, answer):
    assert final_answer(text, "hash") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 18.", "18"), ("The answer is 18. Thank you.", "18"), ("The answer is minus 5.", "-5"),
        ("The answer is not 5.", "not 5"), ("Answer: 18", "18"), ("ANSWER:18", "18"), ("**Answer:** 18", "18"),
        ("Answer:\n\n**18**\n", "18"), ("The final answer is: $18$.", "18"),
        ("The final answer is $x^2$, as shown.", "x^2"), ("The answer is $18 per day.", "$18 per day"),
        ("The answer is 18, because 9 + 9 is 18.", "18"), ("The answer is 18 since there are two nines", "18"),
        ("The answer is 3, so 4 are left", "3"), ("The answers are 3, 4, and 5", "3, 4, and 5"),
        ("Answer: $5$ or $6$", "5 or 6"), ("Final Answer: The largest $n$ is 34.", "34"),
        ("Final Answer: The volume is 120. I hope it is correct.", "120"),
        ("The answer to part (a) is St. Louis. It lies on a river.", "St. Louis"),
        ("The answer is point P. It is fixed.", "point P"), ("Answer: She has 18 apples left.", "18 apples left"),
        ("The answer cannot be determined.", "cannot be determined"), ("<p>The answer is <b>18</b></p>", "18"),
        ("Answer: 42<|im_end|>", "42"), ("The answer is 42</s>", "42"),
        ('{"answer": "\\\\frac{1}{2}", "sure": true}', "\\frac{1}{2}"),
        ('```json\n{"final_answer": "\\frac{1}{2}"}\n```', "\\frac{1}{2}"), ('{"answer": [1, 2]}', "1, 2"),
        *((f"{word}18", "18") for word in ("Antwort: ", "R\u00e9ponse : ", "La respuesta es ",
            "\u041e\u0442\u0432\u0435\u0442: ", "\u56e0\u6b64\uff0c\u7b54\u6848\u662f ", )),
        *((f"{word}18", "18") for word in ("**\u7b54\u6848\uff1a**", "\u3010\u7b54\u6848\u3011", "\uc815\ub2f5: ",
            "\u0627\u0644\u062c\u0648\u0627\u0628: ", "\u0909\u0924\u094d\u0924\u0930: ", "Jibu: ", )),
        *((text, "C") for text in ("Option C is correct.", "Thus (C) is right.", "I choose **C**.",
            "\u6545\u9009C\u3002", "My answer is C!", )),
        ("The correct option is **C**: 5 m/s.", "C: 5 m/s"), ("A is wrong. The answer is B.", "B"),
        ("The answer is $5$ hours.", "5 hours"), ("The answer is \\(x^2\\), since y=3.", "x^2"),
        ("Answer:\n\\[\n\\frac{1}{2}\n\\]", "\\frac{1}{2}"), ("The answer is \\(18\\).", "18"),
        ("The answers are 3 and 5", "3 and 5"), ("The answer is 17. No, the answer is 18", "18"),
        ("The answer is 18. I hope this answers it.", "18"), ("The answer isn't 18", None),
        ("to answer 18 questions", None), ("The answer is", None),
    ],
)  # fmt: skip
def test_the_last_announced_answer_counts(text, answer):
    assert final_answer(text, "answer") == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 and 18.", "5 and 18"), ("costs $1,234.50!", "$1,234.50"), ("down to -3", "-3"),
        ("down to \u22123", "\u22123"), ("about 1/2", "1/2"), ("50% of it", "50%"), ("12 000 people", "12 000 people"),
        ("so .5", ".5"), ("one of 3,4", "3,4"), ("4 hours ago", "4 hours ago"),
        ("it was 1,000.99m\u00b2", "1,000.99 m\u00b2"), ("3 apples + 4 apples = 7 apples", "7 apples"),
        ("So x = 5.", "5"), ("18 apples, with a = b", "18 apples"), ("I found 18. Result = correct", "18"),
        ("2 * price = 18", "18"), ("price * 2 = 18", "18"), ("2*price - fee = 18", "18"),
        ("Area = length * width = 18", "18"), ("Area = l * w = 18", None), ("2x = 18", None), ("y = 3 + x", None),
        ("18 = 9 * 2", None), ("x != 5", None), ("0 <= 5", None), ("none", None), ("from 5-3", None), ("AZYUK2A", None),
        ("\\frac{1}{2}", None), ("2^{10}", None), ("x^3", None), ("x_3", None), ("2xy", None), ("(3, 4)", None),
        ("x \\geq 5 there", None), ("3\\sqrt{2} + 5 units", None), ("at 19:60", None), ("40,\\!320", None),
    ],
)  # fmt: skip
def test_a_number_counts_only_where_it_stands_alone(text, number):
    assert final_answer(text, "last_number") == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think><answer>\\frac{1}{2}</answer>", "\\frac{1}{2}"),
        ("<answer>3</answer> no, <answer>$x = 4$</answer>", "x = 4"), ("<answer>The answer is \\boxed{7}.</answer>", "7"),
        ("\\boxed{1} <answer>2</answer>", "2"), ("<answer>unfinished", None), ("<answer>4</answer> No, <answer>5", None),
        ("<final>18</final>", "18"), ("[ANSWER] 18 [/ANSWER]", "18"), ("<|begin_of_box|>18<|end_of_box|>.", "18"),
        ("<answer></answer>", None),
    ],
)  # fmt: skip
def test_the_last_closed_tag_counts(text, answer):
    assert final_answer(text, "tag") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Therefore we get $\\frac{\\sqrt{3}}{2}$.", "\\frac{\\sqrt{3}}{2}"),
        ("Hence $x = 2$ or $x = 3$.", "x = 2, x = 3"), ("Therefore $x \\geq 5$ is the solution.", "x \\geq 5"),
        ("So\n\\[\nx = 5\n\\]\n", "x = 5"), ("The value of $f(x)$ is 19.", "19"),
        ("We get $a$: $$b = 2.$$ Therefore it grows by 100%.", "100%"),
        ("The result is -\\frac{5 \\pi}{12}, -\\frac{\\pi}{12}.", "-\\frac{5 \\pi}{12}, -\\frac{\\pi}{12}"),
        ("The point is (3, 4).", "(3, 4)"), ("The temperature is \u22123 degrees.", "\u22123 degrees"),
        ("The roots are 10 and 20.", "10 and 20"), ("5 + 13 = 18 apples", "18 apples"),
        ("So the result is 2x + y = 10.", "2x + y = 10"), ("It grows 2x + y = 10 for her", None),
        ("Because of 3 rows, it is 18.", "18"), ("So the day is Monday.", "Monday"),
        ("I think it is Monday. I hope it is correct.", "Monday"),
        ("Adding gives 7 first.\n\n**\\frac{1}{2}**", "\\frac{1}{2}"),
        ("**Step 2:** add 3 to it.\nThe total is **18**.", "18"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
        ("x^2 - 42xy + 9 = 0", "x^2 - 42xy + 9 = 0"), ("$21,16$ or $11$", "21,16 or 11"), ("Monday", "Monday"),
        ("y = 2x", "y = 2x"), ("no idea", None), ("We have 2xy apples", None),
        *((f"It falls on a {mark}Tuesday{mark}.", "Tuesday") for mark in ("*", "**", "***", "_", "__", "`")),
        ("The shape is an **isosceles triangle**!", "isosceles triangle"),
        ("It would be a *Friday*, since 100 mod 7 = 2.", "Friday"), ("She makes __18__ dollars every day.", "18"),
        ("The train arrives at **5:30 PM**.", "5:30 PM"), ("The gift cost $70 - $15 = $55.", "$55"),
        ("They earn 36 hours * $10/hour = $360 a week.", "$360 a week"),
        ("There are 40 x 12 = 480 balloons.", "480 balloons"), ("So 21-12 = 9 pancakes were left.", "9 pancakes"),
        ("It costs $64 for 16 glasses.", None), ("I did not use the number 18.", None), ("It is not 17 but 18.", None),
        ("It is 18. Shall I go through it again?", "18"), ("The answer cannot be determined.", "cannot be determined"),
        ("I can\u2019t determine whether it is 18.", None), ("Starting from 18 I can't decide what to do.", None),
        ("I'm not sure whether it is 18.", None), ("It could be 20, but it could also be 18.", None),
        ("18 is wrong.", None), ("It is 17. So $18$ is clearly incorrect!", None), ("Is the answer 18?", None),
        ("Let me check 18 again.", None), ("The number is not 10, which is 18.", "18"),
        ("The mission was Apollo 11.", "Apollo 11"), ("They flew on Apollo 11.", None),
        ("Each costs $4. She pays $64 for 16 glasses.", None), ("So:\n\n> **12**", "12"), ("It is 12 \u2705", "12"),
        ("Hence $V = 3 + 9 = 12$ $\\blacksquare$", "12"), ("$S = 1 + \\frac12 + \\cdots = 2$", "2"),
        ("Then $x = y = 3$.", "y = 3"), ("So $x = 1, y = 2$.", "x = 1, y = 2"), ("\\[V = 3 + 9 \\\\\n= 12\\]", "12"),
        ("So\n\\begin{align*}\nV &= 3 + 9 \\\\\n&= 12\n\\end{align*}", "12"),
        ("$$\\begin{aligned} 2x &= 6 \\\\ x &= 3 \\end{aligned}$$", "x = 3"),
        ("\\begin{equation}M = \\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}\\end{equation}",
            "M = \\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ],
)  # fmt: skip
def test_what_the_last_sentences_conclude_with_is_the_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize("extraction", ["auto", "last_number"])
@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul])
def test_result_of_arithmetic_is_read(extraction, operation):
    sign = {operator.add: "+", operator.sub: "-", operator.mul: "*"}[operation]
    for first, second in itertools.product(range(0, 21, 4), repeat=2):
        result = str(operation(first, second))
        for text in (f"{first} {sign} {second} = {result}.", f"The answer is {first}{sign}{second}={result}"):
            assert final_answer(text, extraction) == result, text


@pytest.mark.parametrize("table", ["BEFORE", "AFTER"])
def test_each_mark_of_other_notation_keeps_a_number_out(table, monkeypatch):
    texts = getattr(marks, table)
    for text in texts:
        assert marks.last_number(text) is None, text
        others = [pattern for other, pattern in texts.items() if other != text]
        monkeypatch.setattr(marks, f"_{table}", re.compile("|".join(others)))
        assert marks.last_number(text) is not None, f"{text} needs no pattern"
        monkeypatch.undo()


NAMES = (
    "Apollo 11", "7 Up", "St. Louis", "Chanel No. 5", "July 4, 1776", "J. K. Rowling", "The 39 Steps", "Life Is Beautiful",
    "9 pm", "half of 18", "18 squared", "the number after 18", "one more than twice 18", "18!", "\u221a18", "\u00b118",
    "\u230a18\u230b", "~18",
)  # fmt: skip


@pytest.mark.parametrize(
    "form",
    ["<answer>%s</answer>", "\\boxed{%s}", "#### %s", "Final Answer: **%s**", "The answer is %s. We add."],
)
def test_what_a_mark_announces_is_taken_whole(form):
    assert [final_answer(form % name) for name in NAMES] == list(NAMES)


def test_auto_prefers_box_then_hash_then_words_then_number():
    assert final_answer("the answer is 3\n#### 2\n\\boxed{1} 4") == "1"
    assert final_answer("the answer is 3\n#### 2\n 4") == "2"
    assert final_answer("the answer is 3\n 4") == "3"
    assert final_answer("#### 2. Add\nThe answer is 3.\n 4") == "3"
    assert final_answer("maybe 4") == "4"
    assert [final_answer(f"The answer is 3.\n{cut}") for cut in ("\\boxed{4", "<answer>4")] == [None, None]
    assert final_answer("no number") is None


def test_reasoning_is_no_answer():
    assert final_answer("<think>\\boxed{17}</think> \\boxed{18}") == "18"
    assert final_answer("\\boxed{17}</think> 18") == "18"
    assert final_answer("<think>\\boxed{17}, but") is None
    assert final_answer("Wrap thoughts in <think> tags. The answer is 5.") == "5"


@pytest.mark.parametrize(
    "text",
    [
        "plain", 'print("a</think>b")', "re.sub(r'<think>.*?</think>', '', text)",
        'call: {"code": "end = \\"</think>\\""}', "It ends with `</think>` then",
    ],
)  # fmt: skip
def test_a_quoted_mark_ends_no_thought(text):
    assert after_thinking(text) == text
    assert after_thinking(f"<think>{text}</think>{text}") == text
    assert after_thinking(f"{text}</think>{text}") == text


MARKS = [
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<reasoning>", "</reasoning>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|think|>", "<|end|>"),
    (" to=self<|message|>", "<|eom|>"),
]


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_thoughts_of_every_model_hold_no_answer(begin, end):
    assert after_thinking(f"{begin}a") == after_thinking(f"\n{begin}a{end}\n{begin}b") == ""
    assert after_thinking(f"{begin}a{end} b {end} c") == f" b {end} c"
    assert after_thinking(f"{begin}a{end}{begin}b{end}c") == "c"
    assert after_thinking(f'Say "{begin}", "{end}".') == f'Say "{begin}", "{end}".'
    assert after_thinking(f"a{end}b") == ("b" if (begin, end) in MARKS[:8] else f"a{end}b")


def test_mark_of_an_answer_is_no_part_of_it():
    final = "<|start|>assistant<|channel|>final<|message|>4"
    assert after_thinking(f"<|channel|>analysis<|message|>a<|end|>{final}") == after_thinking(final) == "4"
    assert after_thinking("<|END_THINKING|><|START_RESPONSE|>4") == "4"
    assert after_thinking("<think></think>" * 100 + "4") == "4"


def test_thoughts_end_at_the_first_mark():
    assert after_thinking("<think>it's \"odd</think> b</think> c") == " b</think> c"
    assert after_thinking(" \n<think>a") == ""


def test_an_answer_over_the_limit_stays_over_the_limit():
    boxes = ["\\boxed{" + "1" * 1000 + "}", "\\boxed{18" + " " * 1000 + "19}"]
    for text in [*boxes, "#### " + "1" * 5000, "#### " + "1 " * 5000]:
        assert len(final_answer(text, max_chars=50)) > 50


@pytest.mark.parametrize(
    "unit",
    [
        "\\boxed{", "\\boxed{1}", "\\(a", "is 1 ", "1 and ", '"</think>', "<answer>", "answer is ", "#### ", "<think>",
        "$", '"answer": "', "St. ", "\\begin{align}", "[answer][/",
    ],
)  # fmt: skip
def test_hostile_repetition_is_read_without_harm(unit):
    text = unit * (2_000_000 // len(unit))
    answer = final_answer(text)
    assert answer is None or len(answer) < 2000
    assert len(boxed_answers(text)) < 20_000
