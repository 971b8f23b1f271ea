"""What is refused before a worker looks at it, and what must not be."""

import pytest

from rl4llm.rewards.prefilter import refuse


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
        ("(9^9)^9", "power"),
        ("9**9**9", "power"),
        ("9 ^ {99999}", "power"),
        ("9^{12,345}", "power"),
        ("9^{9!}", "power"),
        ("e^{e^{e^{x}}}", "tower"),
        ("\\left( 1 - x \\right) ^ {31}", "power of a sum"),
        ("({-x}{+1})^{31}", "power of a sum"),
        ("\\sqrt[999]{x+1}", "root"),
        ("a" + "_a" * 21, "subscripts"),
        ("100!", "factorial"),
        ("(5!)!", "factorial"),
        ("5!!", "factorial"),
        ("\\sum_{n=1}^{9} n", "sum"),
        ("18\x00", "characters"),
        ("(x+1)^{30}(x+2)^{30}(x+3)^{30}(x+4)^{30}", "too many terms"),
        ("(a+b+c+d+e+f+g+h)^{29}(i+j+k+l)^{29}", "too many terms"),
        ("\\sin \\frac{10^{9999}}{7}", "trigonometric"),
        ("((x^{99})^{99})^{2}", "power"),
        ("x^{9999}-1", "variable"),
        ("\\left(2x\\right)^{999}", "variable"),
        ("x^{y^{z}}" * 30, "more than 40 powers"),
        ("0.1111e9999", "power"),
        ("18\ud800", "characters"),
    ],
)
def test_costly_answers_are_refused_with_the_reason(answer, reason):
    assert reason in refuse(answer, "18")


@pytest.mark.parametrize(
    "answer",
    [
        "x^2 + 2x + 1",
        "11z^{17}(5+11z^{17})",
        "e^{-x^2}",
        "(x^2)^3 y^{n}",
        "2^{2023} - 1",
        "(x+y)^{30}",
        "\\sqrt[10]{2}",
        "(x-1)^2(x-2)^2(x-3)^2(x-4)^2(x+5)^3",
        "\\sin^2(x) + \\cos(10^{2} t)",
        "((x^{2})^{3})^{4}",
        "x^{100} - 1",
        "(3x)^{100}",
        "\\left(-2\\right)^{99}",
        "6.02e23",
        "1 + x + x^2 + x^3 + x^4 + x^5 + x^6 + x^7 + x^8 + x^9",
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
    assert refuse(answer, "x, y") is None


@pytest.mark.parametrize("gold", ["18", "\\frac{7}{3}"])
@pytest.mark.parametrize("relation", ["\\to", "\\approx", "\\\\", "\\cup", "&", "→", "=", "\\text{or}", ". "])
def test_several_values_are_refused_with_any_separator(gold, relation):
    for answer in (f"17 {relation} {gold}", f"{gold} {relation} 17"):
        assert "more than one thing" in refuse(answer, gold)


@pytest.mark.parametrize(
    "answer",
    [
        "x = 18",
        "9 \\cdot 2 = 18",
        "18^\\circ",
        "18\\text{ m}",
        "\\sqrt{324}",
        "\\$18",
        "18\\%",
        "0.\\overline{3}",
        "3!",
    ],
)
def test_a_number_may_be_written_as_numbers_are(answer):
    assert refuse(answer, "18") is None


def test_what_the_trusted_answer_contains_may_be_answered():
    assert refuse("\\binom{9}{2}", "\\binom{9}{7}") is None
    assert refuse("100!", "100!") is None
    assert refuse("\\cos\\frac{\\pi}{7} \\cdot 2^{100}", "2^{100} \\cos\\frac{\\pi}{7}") is None
    assert refuse("\\left\\{1,2\\right\\}", "(1,2)") == "a set where the order counts"
    assert refuse("\\{1,2\\}", "1,2") is None
    assert refuse("(x+1)^{300}", "(1+x)^{300}") is None
    assert refuse("e^{e^{e^{x}}}", "e^{e^{e^{x}}}") is None
    assert refuse("\\sqrt[999]{1+x}", "\\sqrt[999]{x+1}") is None
    assert refuse("1" * 80, "2" * 80) is None
    assert refuse("x(x^{2023}-1)", "x^{2024}-x") is None
    assert refuse("(x+1)^{30}(y+1)^{30}(z+1)^{30}", "((x+1)(y+1)(z+1))^{30}") is None
