"""Which episodes `collect` writes."""

import json
from dataclasses import replace

import pytest

from rl4llm.core.errors import ConfigError
from rl4llm.core.types import ChatMessage, Group, TokenSpan, Trajectory
from rl4llm.data.load import load_rows
from rl4llm.extensions.evaluate.episodes import write_episodes
from rl4llm.tracking.episodes import EpisodeLog


def episode(name, reward, *replies):
    spans = (TokenSpan.context((1, 2)), TokenSpan((3,), "policy", (-0.5,), 0))
    messages = tuple(
        message
        for said in replies
        for message in (ChatMessage("user", "1+1?"), ChatMessage("assistant", said))
    )
    return Trajectory(
        name, spans, messages, {"math": reward}, reward, "done", {"sample": 0, "ground_truth": "2"}
    )


PLAYED = (
    episode("right", 1.0, "2"),
    episode("silent", 1.0, ""),
    episode("silent at first", 1.0, " \n", "2"),
    episode("wrong", 0.0, "3"),
)


def names(path):
    return [json.loads(line)["group"] for line in path.read_text().splitlines()]


def test_filtered_episodes_are_those_that_sft_imitates(tmp_path):
    path = tmp_path / "good.jsonl"
    assert write_episodes(PLAYED, path, 1.0) == (1, 4)
    assert names(path) == ["right"]


def test_without_a_filter_every_episode_is_written(tmp_path):
    path = tmp_path / "all.jsonl"
    assert write_episodes(PLAYED, path) == (4, 4)
    assert names(path) == [played.prompt_id for played in PLAYED]


def test_sft_reads_what_the_tools_of_an_episode_answered(tmp_path):
    """SFT reads the rows of `collect` and those of a run, which also have how each call went."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    path, played = tmp_path / "all.jsonl", episode("tools", 1.0, "2")
    answers = [ChatMessage("tool", "no b", (call,), failed=failed, seconds=0.25) for failed in (True, False)]
    talk = (ChatMessage("user", "1+1?"), ChatMessage("assistant", "", (call,)), *answers, played.messages[1])
    played = replace(played, messages=talk)
    write_episodes([played], path)
    EpisodeLog(tmp_path / "episodes").log(1, [Group("tools", (played,))])
    for file in (path, tmp_path / "episodes" / "step-000001.jsonl"):
        (row,) = load_rows(file, learns_from="demonstrations")
        assert [message["content"] for message in row["messages"]] == [message.content for message in talk]


def test_nothing_is_written_if_every_good_episode_is_silent(tmp_path):
    with pytest.raises(ConfigError):
        write_episodes(PLAYED[1:3], tmp_path / "good.jsonl", 1.0)
    assert not list(tmp_path.iterdir())
