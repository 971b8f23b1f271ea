"""Messages of a program are bounded before they are read, and values equal each other with their types."""

import json
import math

import pytest

from rl4llm.extensions.sandbox.wire import MAX_DIGITS, WireError, decode, encode, read, same, same_text, write

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
    pairs = [
        (1, True),
        (1, 1.0),
        ([1], (1,)),
        ({1}, {True}),
        ({1: 0}, {True: 0}),
        ({1: 0}, {1: False}),
        ([1.0], [1]),
    ]
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
        with pytest.raises(WireError, match="is not a literal"):
            encode(value)


def test_text_comparison_ignores_trailing_spaces_and_lines():
    assert same_text("a \r\nb\t\n\n", "a\nb")
    assert same_text("", "\n")
    for other in ("a\n\nb", " a\nb", "a b", "a\nb\nc", "A\nb"):
        assert not same_text(other, "a\nb")
