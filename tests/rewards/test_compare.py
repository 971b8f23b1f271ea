"""Equality that strings and fractions can tell."""

import pytest

from rl4llm.rewards.compare import number, same


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1,234", "1234"),
        ("1234", "1{,}234"),
        ("32,\\!000", "32000"),
        ("1,234,567.50", "1234567.5"),
        ("0.5", "1/2"),
        ("\\frac{1}{2}", ".5"),
        ("\\frac12", "\\dfrac{1}{2}"),
        ("-\\frac{1}{2}", "\\frac{-1}{2}"),
        ("\\frac {40}7", "40/7"),
        ("18", "$18"),
        ("18", "\\$18"),
        ("18", "18.00"),
        ("18", "18."),
        ("18", " 18 \n"),
        ("18", "+18"),
        ("-3", "\u22123"),
        ("-3", "-$3"),
        ("50%", "50"),
        ("50\\%", "0.5"),
        ("0.5", "50%"),
        ("50", "50 percent"),
        ("18", "18 dollars"),
        ("18", "18 dollars per day"),
        ("10\\;\\text{edges}", "10"),
        ("440\\text{ cm}^2", "440"),
        ("90^\\circ", "90"),
        ("1/3", "0.333333"),
        ("0.6666667", "2/3"),
        ("\\text{(A)}", "A"),
        ("\\text{Tuesday}", "tuesday"),
        ("\\text{1:03 PM}", "1:03 p.m."),
        ("10{:}30", "10:30"),
        ("yes", "YES"),
        ("\\text{No}", "no."),
        ("\\varnothing", "\\emptyset"),
        ("413_5", "413_{5}"),
        ("413_5", "413"),
        ("(3, -1)", "(3,-1)"),
        ("x^2 + 1", "x^2+1"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("$x$", "x"),
    ],
)
def test_equal_numbers_and_words_are_equal_in_every_spelling(gold, answer):
    assert same(gold, answer) is True


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("18", "19"),
        ("18", "-18"),
        ("18", "1.8"),
        ("1/3", "0.33"),
        ("0.33", "1/3"),
        ("50%", "5000%"),
        ("50%", "5"),
        ("10000000000000000", "10000000000000001"),
        ("0.1", "0.10000000000000001"),
        ("west", "stew"),
        ("no", "on"),
        ("no", "n\\cdot o"),
        ("\\text{odd}", "even"),
        ("413_5", "413_6"),
        ("413", "413_5"),
        ("0", "2x-y+2z-18=0"),
    ],
)
def test_different_numbers_and_words_are_different(gold, answer):
    assert same(gold, answer) is False


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "5^2"),
        ("2", "2xy"),
        ("2", "2 x"),
        ("18", "18 million"),
        ("3", "3 and 4"),
        ("12\\text{ and }13", "12"),
        ("3", "x=3"),
        ("x+1", "1+x"),
        ("2\\pi", "2"),
        ("1/0", "1"),
        ("", ""),
        ("18", ""),
        ("1" * 60, "1" * 59),
    ],
)
def test_what_only_computer_algebra_can_tell_is_left_open(gold, answer):
    assert same(gold, answer) is None


@pytest.mark.parametrize(
    "text",
    ["1e5", "\u0661\u0668", "1,23,4", "--5", "$-$5", "1/0", "\\frac{1}{0}", "9" * 51, "", ".", "x", "1 2"],
)
def test_what_is_not_plainly_a_number_is_none(text):
    assert number(text) is None


@pytest.mark.parametrize(
    "unit", ["1", "1,", "(", "\\frac{1}", "18 ab ", " ", "\\text{", "\\text{a}", "a.", "-", "1/", "^2"]
)
def test_hostile_repetition_is_compared_without_harm(unit):
    assert same("18", unit * 200_000) is not True
    assert same("18", unit * (480 // len(unit))) is not True
