"""Rows that do not fit the context are refused with their places, or left out and counted."""

import json

import pytest

from rl4llm.compose.data import longest_rows
from rl4llm.core.errors import DataError
from rl4llm.data.lengths import dropped, fitting_rows, too_long, usable_rows
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


def test_all_long_rows_are_refused_with_file_and_line(rows):
    long = too_long(range(5), tokens(rows), 20)
    with pytest.raises(
        DataError, match=r"^data: 2 of 5 rows are .*train\.jsonl:3 \(prompt '\w+'\) has 30 tok"
    ) as said:
        fitting_rows(rows, long, drop=False, where="data", limit=20)
    assert "train.jsonl:7" in str(said.value) and "data.bad_rows=skip" in str(said.value)


def test_dropped_rows_leave_the_others_as_they_were(rows):
    kept = fitting_rows(rows, too_long(range(5), tokens(rows), 20), drop=True, where="data", limit=20)
    assert [row["messages"][0]["content"] for row in kept] == ["a", "c", "e"]
    assert [place.rsplit(":")[-1] for place in kept.places] == ["1", "5", "9"]
    assert [row["prompt_id"] for row in kept] == [rows[number]["prompt_id"] for number in (0, 2, 4)]
    assert dropped(rows, kept, "data") == [
        "data: 2 of 5 rows are too long and were left out (data.bad_rows=skip)."
    ]
    assert (
        fitting_rows(rows, {}, drop=True, where="data", limit=20) is rows
        and dropped(rows, rows, "data") == []
    )


def test_a_dataset_without_a_row_that_fits_is_refused(rows):
    long = too_long(range(5), tokens(rows), 0)
    with pytest.raises(DataError, match=r"5 of 5 rows are too long: .* Shorten or remove these rows\.$"):
        fitting_rows(rows, long, drop=True, where="data", limit=0)


def test_rows_with_a_fault_and_long_rows_are_counted_apart(rows):
    usable = usable_rows(rows, {0: "it is bad", 4: "it is worse"}, skip=True)
    kept = fitting_rows(usable, {0: 30}, drop=True, where="data", limit=20)
    assert [row["messages"][0]["content"] for row in kept] == ["c", "d" * 40]
    skipped, long = dropped(rows, kept, "data")
    assert skipped.startswith("data: 2 of 5 rows were skipped (data.bad_rows=skip). The first: ")
    assert "train.jsonl:1 (prompt " in skipped and skipped.endswith("it is bad")
    assert long == "data: 1 of 3 rows are too long and were left out (data.bad_rows=skip)."
    with pytest.raises(DataError, match=r"train\.jsonl:1 .*: no\. Or set data\.bad_rows=skip"):
        usable_rows(rows, dict.fromkeys(range(5), "no."), skip=True)


def test_patience_counts_rows_that_fit_after_the_last_long_one(rows):
    assert set(too_long([3, 0, 1, 2, 4], tokens(rows), 20, patience=2)) == {3, 1}
    assert set(too_long([3, 0, 2, 1, 4], tokens(rows), 20, patience=2)) == {3}


def test_the_longest_rows_are_found_by_their_tool_calls_too():
    calls = [{"type": "function", "function": {"name": "write", "arguments": {"text": "long " * 9}}}]
    rows = [
        {"messages": [{"role": "assistant", "content": text, **more}]}
        for text, more in (("a", {}), ("", {"tool_calls": calls}), ("some words", {}))
    ]
    assert longest_rows(rows, 1) == [rows[1]]
