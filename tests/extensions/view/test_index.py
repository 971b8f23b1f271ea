import json
import os

import pytest
from extensions.view.runs import episode, write_run, write_step

from rl4llm.core.types import Group
from rl4llm.extensions.view import index as index_module
from rl4llm.extensions.view.index import COLUMNS, EpisodeIndex, token_ids_of
from rl4llm.tracking.episodes import EpisodeLog

STRANGE = '{"step": 1, "messages": [3, {"role": 4}], "spans": [5, {"token_ids": 6}, {"token_ids": [7]}], "forks": [8]}\n'


def read(directory):
    index = EpisodeIndex(directory)
    index.refresh(60)
    return index


def column(index, name):
    return [row[COLUMNS.index(name)] for row in index.rows]


def line(**fields):
    row = {
        "step": 1, "prompt_id": "p", "sample": 0, "turns": 1, "tokens": 1, "reward": 1.0, "stop_reason": "done",
    }  # fmt: skip
    messages = fields.pop("messages", [{"role": "user", "content": "hello"}])
    return json.dumps({**row, **fields, "messages": messages, "spans": [], "extras": {}}) + "\n"


def file_of(directory, *lines, step=1):
    directory.mkdir(exist_ok=True)
    path = directory / f"step-{step:06d}.jsonl"
    path.write_text("".join(lines))
    return path


def test_index_lists_every_episode_and_returns_it_whole(tokenizer, tmp_path):
    write_run(tmp_path / "run", tokenizer)
    index = read(tmp_path / "run" / "episodes")
    assert len(index.rows) == 3 * 8 + 1
    assert column(index, "step") == [3] * 8 + [2] * 9 + [1] * 8
    assert [failure for failure in column(index, "failure") if failure] == ["env/timeout"]
    for number, row in enumerate(index.rows):
        stored, listed = index.episode(number), dict(zip(COLUMNS, row, strict=True))
        assert (stored["prompt_id"], stored["sample"]) == (listed["prompt"], listed["sample"])
        assert stored.get("reward") == listed["reward"] and stored["turns"] == listed["turns"]
        policy = [span for span in stored["spans"] if span["author"] == "policy"]
        assert listed["tokens"] == sum(len(span["token_ids"]) for span in policy)
        if not listed["failure"]:
            assert listed["turns"] == 2
            assert listed["mismatch"] == pytest.approx(listed["step"] / 1000, abs=1e-5)


def test_a_long_line_is_listed_by_its_beginning_alone(tokenizer, tmp_path, monkeypatch):
    EpisodeLog(tmp_path).log(1, [Group("p", (episode(tokenizer, answer="x" * 300_000),))])
    monkeypatch.setattr(index_module, "_parsed", None)
    monkeypatch.setattr(index_module, "CHUNK", 1000)
    assert column(read(tmp_path), "turns") == [2]


def test_index_adds_episodes_and_waits_for_incomplete_lines(tokenizer, tmp_path):
    log = EpisodeLog(tmp_path)
    write_step(log, tokenizer, 1)
    index = read(tmp_path)
    assert len(index.rows) == 8
    path = file_of(tmp_path, line(step=3), line(step=3, sample=1)[:-20], step=3)
    index.refresh(60)
    assert (len(index.rows), index.pending) == (9, 0)
    path.write_text(line(step=3) + line(step=3, sample=1))
    write_step(log, tokenizer, 5)
    index.refresh(60)
    assert sorted(column(index, "step")) == [1] * 8 + [3] * 2 + [5] * 8 and index.generation == 0


def test_resumed_run_is_read_again(tokenizer, tmp_path):
    log = EpisodeLog(tmp_path)
    for step in (1, 3):
        write_step(log, tokenizer, step)
    index = read(tmp_path)
    log = EpisodeLog(tmp_path, resume_step=1)
    write_step(log, tokenizer, 3, groups=1)
    index.refresh(60)
    assert (index.generation, len(index.rows)) == (1, 12)


def test_what_is_not_read_in_time_is_pending_and_read_later(tokenizer, tmp_path):
    for step in (1, 3, 5):
        write_step(EpisodeLog(tmp_path, resume_step=step), tokenizer, step)
    index, before = EpisodeIndex(tmp_path), -1
    while len(index.rows) > before:
        before = len(index.rows)
        index.refresh(0)
        assert (index.pending > 0) == (len(index.rows) < 24)
    assert column(index, "step") == [5] * 8 + [3] * 8 + [1] * 8


def test_index_shows_damaged_lines(tmp_path):
    index = read(file_of(tmp_path, "no JSON\n", "[1]\n", "\n", line(), STRANGE, step=7).parent)
    assert column(index, "failure") == ["damaged", "damaged", "damaged", "", ""]
    assert index.episode(0)["failure"]
    assert index.search("hello") == ([3], True)
    assert list(token_ids_of(index.episode(4))) == [7]


def test_lines_of_another_json_writer_are_read_as_ours(tmp_path):
    ours = line(part="sums", success=True, ground_truth="42")
    theirs = json.dumps(json.loads(ours), separators=(",", ":")) + "\n"
    first, second = (
        read(file_of(tmp_path / name, text).parent) for name, text in (("a", ours), ("b", theirs))
    )
    assert column(first, "more") == [{"part": "sums", "success": True}]
    assert second.rows == first.rows and second.search("HELLO") == ([0], True)


def test_nonfinite_numbers_and_lone_surrogates_are_shown(tmp_path):
    hostile = line(
        reward=float("nan"), messages=[{"role": "user", "content": "\ud800 \u2028 </script>"}], part="a"
    )
    index = read(file_of(tmp_path, hostile).parent)
    assert column(index, "reward") == [None] and column(index, "more") == [{"part": "a"}]
    json.dumps([index.rows, index.episode(0)], allow_nan=False).encode("ascii")
    assert index.search("</SCRIPT>") == ([0], True)


def test_search_ignores_case_and_the_file_format(tmp_path):
    lines = [
        line(messages=[{"role": "user", "content": 'Größe "x"\n?'}]),
        line(messages=[{"role": "assistant", "content": "", "tool_calls": [{"name": "Calculator"}]}]),
        line(prompt_id="math-7"),
        line(failure="the tool broke", failure_class="tool/broken"),
        line(ground_truth={"messages": ["answer"]}),
    ]
    index = read(file_of(tmp_path, *lines).parent)
    said = {"GRÖSSE": [], "grÖße": [0], '"X"\n?': [0], "calculator": [1], "MATH-7": [2], "tool broke": [3]}
    for text, found in said.items():
        assert index.search(text)[0] == found, text
    for word in ("role", "content", "spans", "stop_reason"):
        assert index.search(word)[0] == [], word
    assert index.search("answer")[0] == [4]


def test_episode_of_a_deleted_file_is_reported(tokenizer, tmp_path):
    write_step(EpisodeLog(tmp_path), tokenizer, 1)
    index = read(tmp_path)
    os.unlink(tmp_path / "step-000001.jsonl")
    with pytest.raises(LookupError, match="no longer"):
        index.episode(0)
    assert index.search("calculator") == ([], True)
    assert read(tmp_path / "nothing").rows == []
