"""Equality that strings and fractions can tell."""

import pytest

from rl4llm.rewards.compare import for_algebra, same, split
from rl4llm.rewards.quantities import number


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1,234", "1234"), ("1234", "1{,}234"), ("32,\\!000", "32000"), ("1,234,567.50", "1234567.5"), ("0.5", "1/2"),
        ("\\frac{1}{2}", ".5"), ("\\frac12", "\\dfrac{1}{2}"), ("-\\frac{1}{2}", "\\frac{-1}{2}"),
        ("\\frac {40}7", "40/7"), ("18", "$18"), ("18", "\\$18"), ("18", "18.00"), ("18", "18."), ("18", " 18 \n"),
        ("18", "+18"), ("-3", "\u22123"), ("-3", "-$3"), ("50%", "50"), ("50\\%", "0.5"), ("0.5", "50%"),
        ("50", "50 percent"), ("18", "18 dollars"), ("18", "18 dollars per day"), ("10\\;\\text{edges}", "10"),
        ("440\\text{ cm}^2", "440"), ("90^\\circ", "90"), ("1/3", "0.333333"), ("0.6666667", "2/3"), ("\\text{(A)}", "A"),
        ("\\text{Tuesday}", "tuesday"), ("\\text{1:03 PM}", "1:03 p.m."), ("10{:}30", "10:30"), ("9 am", "9:00 AM"),
        ("9 a.m.", "9 am"), ("7 Up", "7 up"), ("C", "option (C): 5 m/s"), ("1/3", "0.\\overline{3}"),
        ("\\frac{27}{11}", "2.(45)"), ("x^2 + 1", "x**2+1"), ("\\pi/2", "pi/2"), ("e^{16}-1", "exp(16) - 1"),
        ("\\sqrt{5}", "sqrt(5)"), ("14-i", "14 + -1.0i"), ("\\infty", "oo"), ("\\underline{3}", "\\color{red}{3}"),
        ("2020-05-03", "2020/5/3"), ("yes", "YES"), ("\\text{No}", "no."), ("\\varnothing", "\\emptyset"),
        ("413_5", "413_{5}"), ("413_5", "413"), ("(3, -1)", "(3,-1)"), ("(0,100)", "(0, 100)"),
        ("(x, y) = (2, 500)", "x=2, y=500"), ("(3, 4)", "y=4, x=3"), ("(12,345, 67,890)", "(12345, 67890)"),
        ("\\{5,125\\}", "\\{125, 5\\}"), ("x^2 + 1", "x^2+1"), ("-5", "\u20135"), ("-5", "\uff0d5"), ("5", "\uff15"),
        ("1/2", "\u00bd"), ("3/2", "1\u00bd"), ("x^2", "x\u00b2"), ("x_1=3", "x\u2081 = 3"), ("\\sqrt{2}", "\u221a2"),
        ("3e8", "3 \\times 10^8"), ("300000000", "3E8"), ("6.63 \\cdot 10^{-34}", "6.63e-34"), ("1000", "1 000"),
        ("12345678", "12\u202f345\u202f678"), ("1.2 million", "1,200,000"), ("7", "7 \u5143"), ("2\\frac{1}{2}", "2.5"),
        ("1 1/2", "3/2"), ("1000.99", "1000,99"), ("81, 256", "256, 81"), ("123, 456", "456, 123"),
        ("1, -2", "-2 \\text{ and } 1"), ("\\{3, 5\\}", "5,3"), ("x = 1, y = 2", "y=2, x=1"), ("x = 1, y = 2", "1, 2"),
        ("x = 1, y = 2", "(1, 2)"), ("p=5,q=2;p=7,q=2", "(5,2),(7,2)"), ("(1, 2), (3, 4)", "(3,4), (1,2)"),
        ("(1, \\frac{9}{2})", "(1, 4.5)"), ("(3, 4)", "(x, y) = (3, 4)"), ("x = 3", "3"), ("3", "x=3"),
        ("\\text{Friday}", "x = \\text{Friday}"), ("\\textbf{(B)}\\ 5", "B"), ("\\textbf{(B)}\\ 5", "(b)"),
        ("(B) 5", "5"), ("B", "B) 5"), ("12\\text{ cm}^2", "12 square centimeters"),
        ("36\\text{ square units}", "36 \\text{ cm}^2"), ("5\\text{ red marbles}", "5 marbles"),
        ("60\\text{ mph}", "60 miles per hour"), ("50", "50%"), ("DNA", "dna"), ("\\text{H, E}", "\\text{E, H}"),
        ("1/3", "\\frac{1}{3} \\approx 0.33"), ("11", "x \\approx 11"), ("\\frac{1}{5}", "\\\\frac{1}{5}"),
        ("11111111100", "11,\\! 111,\\! 111,\\! 100"), ("\\left( 1, 2 \\right)", "(1,2)"), ("$x$", "x"),
        ("\\langle 1, 2\\rangle", "(1,2)"), ("3/4", "3/4, or 0.75"),
        *(("\\begin{pmatrix} 1 & -1 \\\\ 1/2 & \\phantom -1,000 \\end{pmatrix}", form) for form in (
            "\\begin{bmatrix}1&-1\\\\0.5&1000\\end{bmatrix}",
            "A = \\left[\\begin{array}{r|r} 1 & -1 \\\\[2pt] \\hline \\frac12 & 1000 \\\\ \\end{array}\\right]",
            "(\\begin{smallmatrix} 1 & \\phantom{0}-1 \\\\ \\dfrac{1}{2} & 1000 \\end{smallmatrix})", )),
    ],
)  # fmt: skip
def test_equal_numbers_and_words_are_equal_in_every_spelling(gold, answer):
    assert same(gold, answer) is True


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("18", "19"), ("18", "-18"), ("18", "1.8"), ("1/3", "0.33"), ("0.33", "1/3"), ("50%", "5000%"), ("50%", "5"),
        ("10000000000000000", "10000000000000001"), ("0.1", "0.10000000000000001"), ("west", "stew"), ("no", "on"),
        ("no", "n\\cdot o"), ("\\text{odd}", "even"), ("413_5", "413_6"), ("413", "413_5"), ("0", "2x-y+2z-18=0"),
        ("cat", "act"), ("DNA", "AND"), ("H2O", "OH2"), ("Ann", "Nan"), ("81, 256", "81256"), ("81256", "81, 256"),
        ("1, -2", "-2"), ("-2", "1, -2"), ("1, 2", "1, 3"), ("1/3, 0.3333333", "1/3, 2/3"),
        ("1/3, 2/3", "1/3, 0.3333333"), ("x = 1, y = 2", "x = 2, y = 1"), ("x = 1, y = 2", "(2, 1)"),
        ("(1, 2)", "(2, 1)"), ("(1, 2)", "y=1, x=2"), ("x=1, y=2", "(y,x)=(1,2)"), ("(1, 2)", "-(1, 2)"),
        ("(1, 2)", "2^{(1, 2)}"), ("(1, 2)", "2x + y = (1, 2)"), ("(1, 2)", "(1, 2, 3)"), ("0.0000012", "10^{-6}"),
        ("6.63\\times10^{-34}", "1.6\\times10^{-19}"), ("0.000001", "1/714285"), ("0.5", "0.5%"), ("1", "1\\%"),
        ("3\\text{ hours}", "3\\text{ minutes}"), ("12\\text{ cm}^2", "12\\text{ cm}^3"),
        ("\\frac{3}{4}\\pi\\text{ inches}", "\\frac{3}{4}\\pi\\text{ feet}"), ("5 apples", "5 oranges"),
        ("30 miles", "30 miles per hour"), ("\\$5", "5 cents"), ("(B) 5", "(C) 5"), ("(B) 5", "6"), ("12:00", "1:00"),
        ("9 am", "9 pm"), ("9:00 am", "9 pm"), ("7 Up", "7"), ("18", "18th"), ("18", "half of 18"),
        ("18", "18 divided by 2"), ("C", "option D"), ("0.\\overline{3}", "0.3"), ("(3, 4)", "(y,x)=(3,4)"),
        ("2020-05-03", "2020-03-05"), ("4/8/2020", "1/2/2020"), ("2020-05-03", "2012"), ("1,234", "1.234"),
        ("18", "18 million"), ("3", "3 and 4"), ("12\\text{ and }13", "12"), ("3/4", "3/4, or 0.76"),
        ("\\begin{pmatrix} 1 & \\phantom -1 \\end{pmatrix}", "\\begin{pmatrix} 2 & \\phantom -1 \\end{pmatrix}"),
        ("\\begin{pmatrix} 1 & \\phantom -1 \\end{pmatrix}", "\\begin{pmatrix} 1 & -1 \\end{pmatrix}"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\end{pmatrix}"),
        ("\\begin{pmatrix} 1 & x \\\\ 2 & y \\end{pmatrix}", "\\begin{bmatrix} 1 & y \\\\ 3 & y \\end{bmatrix}"),
    ],
)  # fmt: skip
def test_different_numbers_and_words_are_different(gold, answer):
    assert same(gold, answer) is False


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "5^2"), *(("18", f"{sign}18") for sign in ("\u221b", "\u00b1", "\u2264", "\u230a", "~")), ("2", "2xy"),
        ("2", "2 x"), ("x+1", "1+x"), ("2xy", "2yx"), ("\\pm 2", "2, -2"), ("3", "x \\approx \\pi"), ("2\\pi", "2"),
        ("\\begin{vmatrix} 1 & 2 \\\\ 3 & 4 \\end{vmatrix}", "-2"),
        ("\\begin{pmatrix} x+1 & 2 \\end{pmatrix}", "\\begin{bmatrix} 1+x & 2 \\end{bmatrix}"), ("1/0", "1"), ("", ""),
        ("18", ""), ("1" * 60, "1" * 59),
    ],
)  # fmt: skip
def test_what_only_computer_algebra_can_tell_is_left_open(gold, answer):
    assert same(gold, answer) is None


@pytest.mark.parametrize(
    "text",
    [
        "1e5000", "5!", "2^{10}", "2xy", "3,4", "\u0661\u0668", "1,23,4", "--5", "$-$5", "1/0", "\\frac{1}{0}", "9" * 51,
        "", ".", "x", "1 2",
    ],
)  # fmt: skip
def test_what_is_not_plainly_a_number_is_none(text):
    assert number(text) is None


@pytest.mark.parametrize(
    "unit", ["1", "1,", "(", "\\frac{1}", "18 ab ", " ", "\\text{", "\\text{a}", "a.", "-", "1/", "^2"]
)
def test_hostile_repetition_is_compared_without_harm(unit):
    assert same("18", unit * 200_000) is not True
    assert same("18", unit * (480 // len(unit))) is not True


def test_items_of_a_list_differ_from_digits_in_groups():
    assert split("81, 256") == ["81", "256"] and split("1,234") == ["1,234"]
    assert split("(1, 2) or (3, 4)") == ["(1, 2)", "(3, 4)"]


def test_computer_algebra_gets_answers_in_one_notation():
    assert for_algebra("x\u00b2 \\text{ and } 90^\\circ") == "x^{2}, 90"
    assert for_algebra("\\frac{\\pi}{2}\\text{ inches}") == "\\frac{\\pi}{2}"
    assert for_algebra("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}").count("\\\\") == 1
