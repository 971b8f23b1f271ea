"""What is refused before a worker looks at it, and what must not be."""

import pytest

from rl4llm.rewards.prefilter import Prefilter


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("x" * 401, "more than 400 characters"),
        ("(" * 13 + "x" + ")" * 13, "nested"),
        ("{x", "braces"),
        ("x}{", "braces"),
        ("1" * 61, "digits"),
        ("9^{9^9}", "power"),
        ("9^9^9", "power"),
        ("{9^9}^9", "power"),
        ("(9^9)^9", "power"),
        ("9**9**9", "power"),
        ("9^{\\left(9^{9}\\right)}", "power"),
        ("9 ^ {99999}", "power"),
        ("9^{12,345}", "power"),
        ("9^{9!}", "power"),
        ("e^{e^{e^{x}}}", "tower"),
        ("(x+y)^{300}", "power of a sum"),
        ("\\left( 1 - x \\right) ^ {31}", "power of a sum"),
        ("\\sqrt[999]{x+1}", "root"),
        ("a" + "_a" * 21, "subscripts"),
        ("100!", "factorial"),
        ("(5!)!", "factorial"),
        ("5!!", "factorial"),
        ("\\sum_{n=1}^{9} n", "sum"),
        ("\\binom{9}{2}", "binom"),
        ("18\x00", "characters"),
        ("18\ud800", "characters"),
    ],
)
def test_costly_answers_are_refused_with_the_reason(answer, reason):
    assert reason in Prefilter().refuse(answer, "18")


@pytest.mark.parametrize(
    "answer",
    [
        "x^2 + 2x + 1",
        "11z^{17}(5+11z^{17})",
        "e^{-x^2}",
        "e^{x^{2}}",
        "(x^2)^3 y^{n}",
        "2^{2023} - 1",
        "(2)^{100} + 1",
        "(x+y)^{30}",
        "\\sqrt[10]{2}",
        "a_1 + a_2 + a_3",
        "10!",
        "n!",
        "4\\!:\\!51",
        "\\frac{1 + \\sqrt{5}}{4}",
        "\\{1, 2\\}",
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        "\\left( -\\infty, \\frac{1 - \\sqrt{5}}{2} \\right] \\cup [2, \\infty)",
    ],
)
def test_ordinary_answers_pass(answer):
    assert Prefilter().refuse(answer, "x, y") is None


@pytest.mark.parametrize("gold", ["18", "\\frac{7}{3}"])
@pytest.mark.parametrize(
    "relation", ["\\to", "\\approx", "\\equiv", "\\\\", "\\cup", "\\foo", "&", "|", "->", "→", "=", "\\text{or}", ". ", "@"]
)
def test_a_number_is_no_list_whatever_stands_between_its_members(gold, relation):
    for answer in (f"17 {relation} {gold}", f"{gold} {relation} 17"):
        assert "more than one thing" in Prefilter().refuse(answer, gold)


@pytest.mark.parametrize(
    "answer",
    ["x = 18", "9 \\cdot 2 = 18", "18^\\circ", "18\\text{ m}", "\\sqrt{324}", "\\$18", "18\\%", "0.\\overline{3}", "3!"],
)
def test_a_number_may_be_written_as_numbers_are(answer):
    assert Prefilter().refuse(answer, "18") is None


def test_what_the_trusted_answer_contains_may_be_answered():
    assert Prefilter().refuse("\\binom{9}{2}", "\\binom{9}{7}") is None
    assert Prefilter().refuse("100!", "100!") is None
    assert Prefilter().refuse("\\left\\{1,2\\right\\}", "(1,2)") == "a set where the order counts"
    assert Prefilter().refuse("\\{1,2\\}", "1,2") is None
    assert Prefilter().refuse("(x+1)^{300}", "(1+x)^{300}") is None
    assert Prefilter().refuse("e^{e^{e^{x}}}", "e^{e^{e^{x}}}") is None
    assert Prefilter().refuse("\\sqrt[999]{1+x}", "\\sqrt[999]{x+1}") is None
    assert Prefilter().refuse("1" * 80, "2" * 80) is None
