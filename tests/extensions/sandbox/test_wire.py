"""Messages of a program are bounded before they are read, and values equal each other with their types."""

import datetime
import json
import math
from decimal import Decimal
from fractions import Fraction

import pytest

from rl4llm.extensions.sandbox.wire import (
    MAX_DIGITS,
    Array,
    WireError,
    agrees,
    decode,
    encode,
    read,
    same,
    same_text,
    write,
)

VALUES = [
    None, True, 0, -(10**50), 0.1, math.inf, "", "ä🐍\udc80\"\\\n", [], [1, [2]], (), (1, (2,)), set(), {1, "a"},
    frozenset({1}), {}, {"a": 1, (1, 2): [3]}, b"\x00\xff", bytearray(b"a"), 1 + 2j,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_literal_comes_back_as_what_it_was(value):
    line = write({"value": encode(value)})
    assert same(decode(read(line)["value"]), value)
    assert same(decode(json.loads(line)["value"]), value)
    constants = {"true": True, "false": False, "null": None, "Infinity": math.inf}
    assert same(decode(eval(line.decode(), constants)["value"]), value)  # in the sandbox it is read as Python


def test_only_equal_values_of_equal_types_are_the_same():
    for index, value in enumerate(VALUES):
        for other, twin in enumerate(VALUES):
            assert same(value, twin) == (index == other), (value, twin)
    pairs = [(1, True), (1, 1.0), ([1], (1,)), ({1}, {True}), ({1: 0}, {True: 0}), ({1: 0}, {1: False})]
    assert not any(same(left, right) for left, right in pairs)
    assert same(math.nan, math.nan)
    assert same([0.1 + 0.2], [0.3], 1e-9)
    assert not same(0.1 + 0.2, 0.3)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"7", b"[1]", b"{", b'{"a":1}x', b'{"a":1,"a":2}', b'{"v":{"set":[1],"set":[2]}}', b"\xff\xfe{}", b"\x80",
        b'{"v":' + b"[" * 300 + b"]" * 300 + b"}", b'{"v":' + b"[" * 100_000, b'{"v":' + b"9" * (MAX_DIGITS + 1) + b"}",
        b'{"v":-' + b"9" * (MAX_DIGITS + 1) + b"}", b'{"v":0.' + b"9" * (MAX_DIGITS + 1) + b"}",
    ],
)  # fmt: skip
def test_lines_that_no_honest_program_sends_are_refused(line):
    with pytest.raises(WireError):
        read(line)


@pytest.mark.parametrize(
    "value",
    [{}, {"int": 1}, {"set": [[1]]}, {"set": 5}, {"dict": [[1]]}, {"dict": [[1, 2], [1, 3]]}, {"bytes": "ā"}, {"bytes": 1},
     {"complex": []}, {"complex": [10**400, 0]}, {"tuple": None}, {"set": [i * (2**61 - 1) for i in range(200)]}],
)  # fmt: skip
def test_objects_that_are_no_literals_are_refused(value):
    with pytest.raises(WireError):
        decode(value)


def test_what_is_no_literal_is_not_sent():
    for value in (object(), len, range(3), [lambda: 1]):
        with pytest.raises(WireError):
            encode(value)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("a \r\nb\t\n\n", "a\nb"), ("", "\n"), (" a  b\n\nc", "a b\nc"), ("2.0", "2"), ("2", "2.0"), ("+7", "7"),
        ("1e3", "1000"), ("0.30000000000000004", "0.3"), ("0.6666666", "0.66667"),
        ("nan", "nan"), (f"{2**70}.0", f"{2**70}"), ("-0", "0"),
    ],
)  # fmt: skip
def test_outputs_that_the_judges_accept_are_the_same(printed, expected):
    assert same_text(printed, expected)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("a b\nc", "a\nb c"), ("ab", "a b"), ("a\nb\nc", "a\nb"), ("A", "a"), ("YES", "Yes"), ("007", "7"), ("7", "007"),
        ("10000000000000001", "10000000000000000"), ("1e16", "10000000000000001"), ("2.0000001", "2"), ("1_0", "10"),
        ("123456789013.5", "123456789012.5"), ("1000000008.0", "1000000007.0"), ("0.31", "0.3"), ("0.000001", "0.000002"),
        ("inf", "1.5"), ("nan", "1"), ("1e999999999", "1.5"), (".", "0.0"), ("²", "2"), ("1 2 3", "1 2"),
        ("e5", "5"), (".e5", "0.5"), ("0", "-e1"),
    ],
)  # fmt: skip
def test_wrong_outputs_are_not_the_same(printed, expected):
    assert not same_text(printed, expected)


def test_json_values_agree_as_in_the_judges():
    agreeing = [
        ((1, 2), [1, 2]), ([(1, [2])], [[1, [2]]]), (2.0, 2), (2, 2.0), (True, 1), ({1: "a"}, {"1": "a"}), (0.1 + 0.2, 0.3),
        (Decimal("0.5"), 0.5), (Fraction(1, 3), 1 / 3), (2.00000001, 2.0), (math.nan, math.nan), (math.inf, math.inf),
        (10**400, 10**400), (None, None), ("a", "a"),
    ]  # fmt: skip
    for value, expected in agreeing:
        assert agrees(value, expected), (value, expected)
    differing = [
        (3, 2), (2.1, 2), (1000000008, 1000000007), (1000000008, 1000000007.0), (2**53 + 1, 2**53),
        (float(2**53), 2**53 + 1), ([1], [1, 2]), ([1], 1), (1, [1]), ("1", 1),
        (1, "1"), ({1, 2}, [1, 2]), ({1: 0, "1": 0}, {"1": 0}),
        (None, 0), ("", None), (math.inf, 1.5), (10**400, 1.5), (math.nan, 0.0), (True, 2.0), ({"a": 1}, {"a": 1, "b": 2}),
    ]  # fmt: skip
    for value, expected in differing:
        assert not agrees(value, expected), (value, expected)


RICH = [
    Decimal("1.50"), Decimal("NaN"), Fraction(-1, 3), Fraction(4), datetime.date(2024, 2, 29), datetime.time(1, 2, 3, 4),
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4, datetime.UTC), datetime.timedelta(-1, 2, 3), Array("<f8", [[1.0], [2.0]]),
]  # fmt: skip


@pytest.mark.parametrize("value", RICH, ids=repr)
def test_numbers_dates_and_arrays_come_back_with_their_type(value):
    back = decode(read(write({"value": encode(value)}))["value"])
    assert (type(back), str(back)) == (type(value), str(value))


@pytest.mark.parametrize(
    "value",
    [{"Decimal": "1e100000"}, {"Decimal": "1" * (MAX_DIGITS + 1)}, {"Decimal": "x"}, {"Decimal": "-sNaN1"},
     {"Fraction": "1/0"}, {"Fraction": "a/b"},
     {"Fraction": "1" * (MAX_DIGITS + 1) + "/1"}, {"date": "2024"}, {"date": 5}, {"timedelta": ["1"]},
     {"ndarray": ["|O8", []]}, {"ndarray": ["<f8"]}, {"object": [1]}, {"object": ["1", "A"]}, {"object": [True, "A"]}],
)  # fmt: skip
def test_malformed_numbers_dates_and_objects_are_refused(value):
    with pytest.raises(WireError):
        decode(value)
