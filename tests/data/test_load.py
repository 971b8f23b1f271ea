"""Rows from every kind of source become prompts, and an invalid row is refused with its place."""

import csv
import gzip
import json
import re
import socket
import time
import tracemalloc

import datasets
import pytest

from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.types import ChatMessage
from rl4llm.data.load import load_rows
from rl4llm.data.read import has_splits

QA = [
    {"question": "What is 1+1?", "answer": "so #### 2"},
    {"question": "What is 2+2?", "answer": "so #### 4"},
]
COLUMNS = {"prompt_column": "question", "answer_column": "answer"}
PATTERN = r"####\s*(.+)"
READY = {"messages": [{"role": "user", "content": "What is 1+1?"}], "ground_truth": "2"}


def write(path, *lines):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def jsonl(path, rows=QA):
    return write(path, *(json.dumps(row) for row in rows))


def truths(rows):
    return [row["ground_truth"] for row in rows]


def test_a_prompt_is_made_from_columns(tmp_path):
    rows = load_rows(
        jsonl(tmp_path / "qa.jsonl"),
        **COLUMNS,
        answer_pattern=PATTERN,
        system_prompt="Be brief.",
        prompt_template="Q: {prompt} Put it in \\boxed{{}}.",
    )
    assert len(rows) == 2
    assert rows[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: What is 1+1? Put it in \\boxed{}."},
    ]
    assert truths(rows) == ["2", "4"]
    assert rows[1]["question"] == "What is 2+2?"
    assert [*rows[0]] == ["prompt_id", "messages", "ground_truth", "question", "answer"]
    assert [ChatMessage.from_dict(message).role for message in rows[0]["messages"]] == ["system", "user"]


def test_rows_with_messages_are_taken_as_they_are():
    row = {**READY, "level": 3, "messages": [{"role": "user", "content": "hi", "tool_calls": None}]}
    rows = load_rows([row], system_prompt="Be brief.")
    assert [message["content"] for message in rows[0]["messages"]] == ["Be brief.", "hi"]
    assert rows[0]["level"] == 3
    assert row["messages"] == [{"role": "user", "content": "hi", "tool_calls": None}]


def save_csv(path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(QA)
    return path


def save_gz(path):
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, QA)).encode()))
    return path


def save_arrow(path):
    datasets.Dataset.from_list(QA).save_to_disk(path)
    return path


def save_splits(path):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(QA)}).save_to_disk(path)
    return path


def save_parquet(path):
    datasets.Dataset.from_list(QA).to_parquet(path)
    return path


FORMS = {
    "rows": lambda tmp: QA,
    "generator": lambda tmp: (row for row in QA),
    "dataset": lambda tmp: datasets.Dataset.from_list(QA),
    "splits": lambda tmp: datasets.DatasetDict({"train": datasets.Dataset.from_list(QA)}),
    "jsonl": lambda tmp: jsonl(tmp / "a.jsonl"),
    "jsonl.gz": lambda tmp: save_gz(tmp / "a.jsonl.gz"),
    "json": lambda tmp: write(tmp / "a.json", json.dumps(QA, indent=1)),
    "json by split": lambda tmp: str(write(tmp / "a.json", json.dumps({"train": QA}))),
    "csv": lambda tmp: save_csv(tmp / "a.csv"),
    "parquet": lambda tmp: str(save_parquet(tmp / "a.parquet")),
    "saved": lambda tmp: save_arrow(tmp / "saved"),
    "saved splits": lambda tmp: save_splits(tmp / "saved"),
    "directory": lambda tmp: jsonl(tmp / "train.jsonl").parent,
    "directory.gz": lambda tmp: save_gz(tmp / "train.jsonl.gz").parent,
    "windows": lambda tmp: write(
        tmp / "a.jsonl", b"\xef\xbb\xbf" + json.dumps(QA[0]).encode() + b"\r\n\r", json.dumps(QA[1])
    ),
    "loaded": lambda tmp: load_rows(QA, **COLUMNS),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_rows_gives_the_same_prompts(form, tmp_path):
    rows = load_rows(FORMS[form](tmp_path), **COLUMNS, answer_pattern=PATTERN)
    assert list(rows) == list(load_rows(QA, **COLUMNS, answer_pattern=PATTERN))


@pytest.mark.parametrize("form", FORMS)
def test_a_source_with_splits_refuses_an_unknown_split(form, tmp_path):
    source = FORMS[form](tmp_path)
    try:
        load_rows(source, split="nowhere", **COLUMNS)
    except DataError as error:
        assert "nowhere" in str(error)
        assert has_splits(source)
    else:
        assert not has_splits(source)


def test_a_dataset_of_the_hub_has_splits():
    assert has_splits("openai/gsm8k:main")


def test_the_split_names_a_file_of_a_directory(tmp_path):
    jsonl(tmp_path / "train.jsonl")
    jsonl(tmp_path / "test.jsonl", QA[:1])
    assert len(load_rows(tmp_path, split="test", **COLUMNS)) == 1
    with pytest.raises(DataError):
        load_rows(tmp_path, split="validation", **COLUMNS)
    save_csv(tmp_path / "test.csv")
    with pytest.raises(DataError):
        load_rows(tmp_path, split="test", **COLUMNS)


def test_a_split_may_have_several_files_if_none_is_missing(tmp_path):
    for number in (1, 0, 2):
        jsonl(
            tmp_path / f"train-0000{number}-of-00003.jsonl",
            [{**READY, "id": f"{number}{row}"} for row in range(2)],
        )
    jsonl(tmp_path / "test-00000-of-00001.jsonl", [READY])
    assert [row["prompt_id"] for row in load_rows(tmp_path)] == ["00", "01", "10", "11", "20", "21"]
    assert len(load_rows(tmp_path, split="test")) == 1
    (tmp_path / "train-00001-of-00003.jsonl").rename(tmp_path / "train-00001-of-00002.jsonl")
    with pytest.raises(DataError):
        load_rows(tmp_path)
    (tmp_path / "train-00001-of-00002.jsonl").unlink()
    with pytest.raises(DataError):
        load_rows(tmp_path)
    jsonl(tmp_path / "train.jsonl")
    with pytest.raises(DataError):
        load_rows(tmp_path)


SAID = {"role": "assistant", "content": "4"}
ASKED = {"role": "user", "content": "2+2?"}
TOLD = {
    "texts": ({"prompt": "2+2?", "completion": "4"}, {}),
    "messages": ({"prompt": [ASKED], "completion": [SAID]}, {}),
    "columns": (
        {"question": "2+2?", "output": "4"},
        {"prompt_column": "question", "answer_column": "output"},
    ),
    "a template": (
        {"prompt": "2+2", "completion": "4"},
        {"prompt_column": "prompt", "prompt_template": "{prompt}?"},
    ),
}


@pytest.mark.parametrize("form", TOLD)
def test_a_prompt_and_its_completion_form_a_conversation(form):
    row, columns = TOLD[form]
    assert load_rows([row], learns_from="demonstrations", **columns)[0]["messages"] == [ASKED, SAID]


def test_calls_one_by_one_are_calls_of_one_message():
    calls = [{"name": "add", "arguments": {"a": number}} for number in (1, 2)]
    called = [("tool_call", json.dumps(call)) for call in calls]
    said = [("human", "?"), *called, ("tool_response", "1"), ("gpt", "3")]
    turns = [{"from": speaker, "value": text} for speaker, text in said]
    (row,) = load_rows([{"conversations": turns}], learns_from="demonstrations")
    _, called, *_ = row["messages"]
    assert [call["function"] for call in called["tool_calls"]] == calls
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_a_message_that_only_calls_a_tool_may_have_no_text():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = [ASKED, calling, {"role": "tool", "content": "4"}, SAID]
    rows = load_rows([{"messages": told}], learns_from="demonstrations")
    assert rows[0]["messages"][1] == {**calling, "content": ""}


def test_a_limit_takes_the_first_rows_and_reads_no_further(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps(QA[0]), "{broken")
    assert truths(load_rows(path, **COLUMNS, limit=1)) == ["so #### 2"]
    assert len(load_rows(QA, **COLUMNS)[:1]) == 1


def test_prompt_names_depend_only_on_the_question():
    rows = load_rows(QA, **COLUMNS)
    other = load_rows(
        list(reversed(QA)), **COLUMNS, system_prompt="x", prompt_template="{prompt}!", answer_pattern=PATTERN
    )
    assert [row["prompt_id"] for row in rows] == [row["prompt_id"] for row in reversed(other)]
    assert len({row["prompt_id"] for row in rows}) == 2
    assert load_rows([READY])[0]["prompt_id"] == load_rows([{**READY, "level": 1}])[0]["prompt_id"]


def test_equal_rows_get_distinct_names():
    ids = [row["prompt_id"] for row in load_rows([QA[0], QA[1], QA[0], QA[0]], **COLUMNS)]
    assert ids[2:] == [f"{ids[0]}-2", f"{ids[0]}-3"]
    assert len(set(ids)) == 4


def test_given_ids_are_kept_and_numbered_where_they_repeat():
    assert load_rows([{**READY, "id": 0}])[0]["prompt_id"] == "0"
    assert load_rows([{**READY, "id": 0, "prompt_id": "a"}])[0]["prompt_id"] == "a"
    rows = load_rows([{**READY, "id": name} for name in ("a", "b", "a", "a-2", "a")])
    assert [row["prompt_id"] for row in rows] == ["a", "b", "a-2", "a-2-2", "a-3"]
    assert load_rows([{**READY, "id": None}])[0]["prompt_id"] == load_rows([READY])[0]["prompt_id"]


GOOD = json.dumps(QA[0])
BROKEN_FILES = {  # name, lines, and the number of the line that the message names
    "broken line": ("a.jsonl", [GOOD, '{"question": '], 2),
    "torn line": ("a.jsonl", [GOOD, GOOD[:20]], 2),
    "other encoding": ("a.jsonl", [GOOD, b'{"question": "caf\xe9"}'], 2),
    "not an object": ("a.jsonl", [GOOD, "", "[1, 2]"], 3),
    "other columns": ("a.jsonl", [GOOD, '{"questoin": "x", "answer": "y"}'], 2),
    "no answer": ("a.jsonl", [GOOD, '{"question": "x"}'], 2),
    "null answer": ("a.jsonl", ['{"question": "x", "answer": null}'], 1),
    "no match": ("a.jsonl", [GOOD, '{"question": "x", "answer": "7"}'], 2),
    "number matched": ("a.jsonl", ['{"question": "x", "answer": 7}'], 1),
    "empty prompt": ("a.jsonl", [GOOD, '{"question": " \\n", "answer": "#### 1"}'], 2),
    "number asked": ("a.jsonl", ['{"question": 5, "answer": "#### 1"}'], 1),
    "half a surrogate": ("a.jsonl", ['{"question": "\\ud83d!", "answer": "#### 1"}'], 1),
    "surrogate elsewhere": ("a.jsonl", ['{"question": "x", "answer": "#### 1", "tags": [{"a": "\\udc00"}]}'], 1),
    "empty": ("a.jsonl", [""], None),
    "deep": ("a.jsonl", ["[" * 100_000], 1),
    "a name twice": ("a.jsonl", ['{"question": "x", "answer": "y", "answer": "z"}'], 1),
    "a name twice inside": ("a.json", ['[{"question": "x", "answer": "y", "a": {"b": 1, "b": 2}}]'], None),
    "a column twice": ("a.csv", ["question,answer,answer", "x,y,z"], 1),
    "lines of a list": ("a.json", ["[", GOOD + ",", "oops]"], None),
    "a number": ("a.json", ["5"], None),
    "other splits": ("a.json", ['{"data": []}'], None),
    "few fields": ("a.csv", ["question,answer", "x,#### y", "x"], 3),
    "many fields": ("a.csv", ["question,answer", "x,y,z"], 2),
    "encoding of a table": ("a.csv", ["question,answer", b"caf\xe9,y"], 2),
    "encoding of all": ("a.csv", ["question,answer\nx,y".encode("utf-16")], None),
    "another type": ("a.txt", [GOOD], None),
}  # fmt: skip


PACKED = gzip.compress(GOOD.encode())
TORN = {
    "a.csv": ["question,answer", "x,y", '"x,y', "x,y"],
    "a.parquet": ["x"],
    "a.jsonl.gz": [PACKED[:-12]],
    "b.jsonl.gz": [GOOD],
    "c.jsonl.gz": [PACKED[:20] + bytes(9) + PACKED[29:]],
}


@pytest.mark.parametrize("name", TORN)
def test_a_torn_file_is_not_read_in_part(name, tmp_path):
    with pytest.raises(DataError, match=re.escape(str(tmp_path / name))):
        load_rows(write(tmp_path / name, *TORN[name]), **COLUMNS)


@pytest.mark.parametrize("fault", BROKEN_FILES)
def test_a_fault_in_a_file_is_reported_with_its_line(fault, tmp_path):
    name, lines, number = BROKEN_FILES[fault]
    path = write(tmp_path / name, *lines)
    with pytest.raises(DataError, match=re.escape(str(path) if number is None else f"{path}:{number}: ")):
        load_rows(path, **COLUMNS, answer_pattern=PATTERN)


NULLS = [
    {"question": "x", "answer": None},
    {"question": None, "answer": "y"},
    {"question": "x", "answer": "y"},
]


@pytest.mark.parametrize(
    ("name", "lines"),
    [("a.csv", ["question,answer", "x,", ",y", "x,y"]), ("a.jsonl", [*map(json.dumps, NULLS)])],
)
def test_an_empty_cell_is_a_null(tmp_path, name, lines):
    path = write(tmp_path / name, *lines)
    rows = load_rows(path, bad_rows="skip", **COLUMNS)
    assert [row["ground_truth"] for row in rows] == [None, "y"]
    for kind in ("episodes", "demonstrations"):
        with pytest.raises(DataError):
            load_rows(path, learns_from=kind, **COLUMNS)


def test_a_missing_path_names_its_neighbour(tmp_path):
    jsonl(tmp_path / "train.jsonl")
    with pytest.raises(DataError):
        load_rows(tmp_path / "trian.jsonl", **COLUMNS)
    with pytest.raises(DataError):
        load_rows("./data", **COLUMNS)


@pytest.fixture
def hub_is_there(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield


def test_an_unreachable_hub_says_what_to_do(monkeypatch, hub_is_there):
    def unreachable(name, config, split):
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError):
        load_rows("openai/gsm8k:main", **COLUMNS)


def test_a_hub_dataset_without_a_network_is_refused_at_once(monkeypatch, caplog):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    started = time.monotonic()
    with pytest.raises(DataError):
        load_rows("nobody/no-such-dataset", **COLUMNS)
    assert time.monotonic() - started < 10  # the hub's own client would take 30 s
    assert not caplog.records


def test_a_hub_name_is_loaded_with_its_config_and_split(monkeypatch, hub_is_there):
    asked = []

    def hub(*names, split):
        asked.append((*names, split))
        return datasets.Dataset.from_list(QA)

    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert len(load_rows("openai/gsm8k:main", split="test", **COLUMNS)) == 2
    assert len(load_rows("openai/gsm8k", **COLUMNS)) == 2
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", None, "train")]


OPTIONS = [
    {"prompt_template": ""},
    {"prompt_template": "Solve it."},
    {"prompt_template": r"{prompt} \boxed{}"},
    {"prompt_template": "{prompt} {answer}"},
    {"answer_pattern": "####.*"},
    {"answer_pattern": "("},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_options_that_cannot_work_are_refused_before_any_row(options):
    with pytest.raises(ConfigError):
        load_rows(QA, **COLUMNS, **options)


def test_a_template_cannot_wrap_messages():
    with pytest.raises(ConfigError):
        load_rows([READY], prompt_template="Q: {prompt}")


def test_rows_of_a_file_take_little_more_memory_than_the_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = [
        {"question": f"What is {number} plus {number}?", "answer": str(2 * number)} for number in range(2000)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    load_rows(file, prompt_column="question", answer_column="answer", limit=1)  # imports what it needs
    tracemalloc.start()
    rows = load_rows(file, prompt_column="question", answer_column="answer")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 7 * file.stat().st_size  # as dicts: more than 10 times
    assert rows[1999]["ground_truth"] == "3998" and rows[1999] == rows[1990:][9]
