"""Rows that do not fit the context are refused with their places, or left out and counted."""

import json

import pytest

from rl4llm.compose.data import longest_rows
from rl4llm.core.errors import DataError, TemplateError
from rl4llm.data.lengths import dropped, unfit, usable_rows
from rl4llm.data.load import load_rows


@pytest.fixture
def rows(tmp_path):
    texts = ["a", "b" * 30, "c", "d" * 40, "e"]
    lines = [
        json.dumps({"messages": [{"role": "user", "content": text}], "ground_truth": ""}) for text in texts
    ]
    (tmp_path / "train.jsonl").write_text("\n\n".join(lines))  # a row on every second line
    return load_rows(tmp_path / "train.jsonl")


def tokens(rows):
    return lambda number: len(rows[number]["messages"][0]["content"])


def test_the_first_long_row_is_refused_with_file_and_line(rows):
    faults = unfit(range(5), tokens(rows), 20, skip=False)
    with pytest.raises(
        DataError, match=r"train\.jsonl:3 \(prompt '\w+'\): it has 30 tokens, .*data\.bad_rows=skip"
    ):
        usable_rows(rows, faults, skip=False)
    assert usable_rows(rows, {}, skip=False) is rows


def test_dropped_rows_leave_the_others_as_they_were(rows):
    def length(number):
        if number == 2:
            raise TemplateError("no such role")
        return tokens(rows)(number)

    faults = unfit(range(5), length, 20, skip=True)
    kept = usable_rows(rows, faults, skip=True)
    assert [row["messages"][0]["content"] for row in kept] == ["a", "e"]
    assert [place.rsplit(":")[-1] for place in kept.places] == ["1", "9"]
    assert [row["prompt_id"] for row in kept] == [rows[number]["prompt_id"] for number in (0, 4)]
    (warning,) = dropped(rows, kept, "data")
    assert warning.startswith("data: 3 of 5 rows were skipped (data.bad_rows=skip). The first: ")
    assert "train.jsonl:3 (prompt " in warning and "no such role" in kept.skipped[1]
    again = usable_rows(kept, {0: "it is bad"}, skip=True)
    assert dropped(rows, again, "data")[0].startswith("data: 4 of 5 rows")
    assert dropped([*rows], [*kept], "data") == ["data: 3 of 5 rows were skipped (data.bad_rows=skip)."]
    assert dropped(rows, rows, "data") == []
    with pytest.raises(DataError):
        usable_rows(rows, dict.fromkeys(range(5), "no."), skip=True)


def test_patience_counts_rows_that_fit_after_the_last_long_one(rows):
    for order, long in (([3, 0, 1, 2, 4], {3, 1}), ([3, 0, 2, 1, 4], {3})):
        assert {*unfit(order, tokens(rows), 20, skip=True, patience=2)} == long


def test_the_longest_rows_are_found_by_their_tool_calls_too():
    calls = [{"type": "function", "function": {"name": "write", "arguments": {"text": "long " * 9}}}]
    rows = [
        {"messages": [{"role": "assistant", "content": text, **more}]}
        for text, more in (("a", {}), ("", {"tool_calls": calls}), ("some words", {}))
    ]
    assert longest_rows(rows, 1) == [rows[1]]
