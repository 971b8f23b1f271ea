import json
import os
from dataclasses import replace

import pytest
import torch
from packed import pack

from rl4llm.core.base_env import SampleState
from rl4llm.core.types import ChatMessage, Completion, Group, TokenSpan, Trajectory
from rl4llm.data.pack import totals_of
from rl4llm.sync.verify import sampled_by
from rl4llm.tracking.episodes import EpisodeLog, TrainedTokens
from rl4llm.tracking.tracker import read_jsonl

MESSAGES = (ChatMessage("user", "6 x 7?"), ChatMessage("assistant", "42", tool_calls=({"name": "f"},)))


def trajectory(prompt_id="p", sample=0, **extras):
    completion = Completion("42", (5, 6), (-0.1, -1 / 3), "stop", version=11)
    spans = (TokenSpan.context([1, 2]), *TokenSpan.policy(completion))
    extras = {"sample": sample, "ground_truth": "42", **extras}
    rewards, successes = {"accuracy": 1.0, "length": 0.5}, {"accuracy": True}
    return Trajectory(prompt_id, spans, MESSAGES, rewards, 1.5, "done", extras, successes=successes)


def failed(prompt_id="p"):
    spans = [TokenSpan.context([1, 2])]
    return SampleState(
        prompt_id,
        3,
        [ChatMessage("user", "\ud800?")],
        "42",
        stop_reason="failed",
        failure="the tool broke",
        spans=spans,
    )


def groups(count, size=2):
    return [
        Group(f"p{i}", tuple(trajectory(f"p{i}", sample) for sample in range(size))) for i in range(count)
    ]


def packed(trajectories, layout):
    (batch,) = pack(
        trajectories,
        [0.5] * len(trajectories),
        max_tokens_per_batch=1000,
        layout=layout,
        aggregation="token",
        totals=totals_of(trajectories),
        pad_token_id=0,
    )
    batch.advantages_BT = batch.credits_BT
    return batch


def names(directory):
    return sorted(os.listdir(directory))


def test_an_episode_keeps_every_token_its_author_and_advantage(tmp_path):
    EpisodeLog(tmp_path).log(12, [Group("p", (trajectory(sample=4, seed=9),))], credits=[[0.25]])
    assert read_jsonl(tmp_path / "step-000012.jsonl") == [
        {
            "step": 12,
            "prompt_id": "p",
            "sample": 4,
            "reward": 1.5,
            "rewards": {"accuracy": 1.0, "length": 0.5},
            "success": True,
            "stop_reason": "done",
            "turns": 1,
            "tokens": 2,
            "ground_truth": "42",
            "messages": [
                {"role": "user", "content": "6 x 7?"},
                {"role": "assistant", "content": "42", "tool_calls": [{"name": "f"}]},
            ],
            "spans": [
                {"author": "context", "token_ids": [1, 2]},
                {"author": "policy", "token_ids": [5, 6], "logprobs": [-0.1, -1 / 3], "version": 11},
            ],
            "extras": {"seed": 9},
            "credit": 0.25,
        }
    ]


def test_long_fields_come_last_in_a_row(tmp_path):
    EpisodeLog(tmp_path).log(3, [Group("p", (trajectory(),))], [failed()], credits=[[0.25]])
    for line in (tmp_path / "step-000003.jsonl").read_text().splitlines():
        names = list(json.loads(line))
        assert names[-4:] == ["messages", "ground_truth", "spans", "extras"]
        assert {"step", "sample", "stop_reason", "turns", "tokens"} < set(names[:-4])


def test_trained_tokens_have_the_trainers_log_probs(tmp_path):
    quiet, taught = trajectory(sample=0), trajectory(sample=1)
    trained = TrainedTokens()
    batch = packed([taught], "packed")
    trained.add([taught.spans], batch, torch.tensor([[0, 0, -0.1, -0.25]]), torch.tensor([[0, 0, 0, 1]]))
    EpisodeLog(tmp_path).log(1, [Group("p", (quiet, taught))], trained=trained)
    without, with_numbers = read_jsonl(tmp_path / "step-000001.jsonl")
    assert "mismatch" not in without and "weight" not in without["spans"][1]
    assert with_numbers["mismatch"] == pytest.approx(1 / 3 - 0.25, abs=1e-6)
    assert with_numbers["spans"][0] == {"author": "context", "token_ids": [1, 2]}
    span = with_numbers["spans"][1]
    assert (span["trainer_logprobs"], span["advantages"]) == ([-0.1, -0.25], [0.5, 0.5])
    assert (span["weight"], span["clipped"]) == (0.5, [1])


def test_numbers_stay_with_their_spans_where_others_are_masked():
    """A teacher on a server may have scored only a part of a record."""
    spans = tuple(
        span
        for version in (1, 2, 1)
        for span in (
            TokenSpan.context([1, 2]),
            *TokenSpan.policy(Completion("42", (5, 6), (-0.1, -0.2), "stop", version=version)),
        )
    )
    batch = packed([replace(trajectory(), spans=spans)], "packed")
    logprobs_BT = -torch.arange(12.0)[None]
    assert sampled_by(1, [spans], batch)[0].nonzero().flatten().tolist() == [2, 3, 10, 11]
    batch.mask_BT = batch.mask_BT & (torch.arange(12) != 3)
    trained = TrainedTokens()
    trained.add([spans], batch, logprobs_BT)
    notes = trained.by_span()
    assert [notes[id(span)].logprobs for span in spans if id(span) in notes] == [[-6, -7], [-10, -11]]
    assert sampled_by(1, [spans], batch)[0].nonzero().flatten().tolist() == [2, 10, 11]
    assert sampled_by(2, [spans], batch)[0].nonzero().flatten().tolist() == [6, 7]


def test_records_of_a_rewritten_history_are_stored_in_the_row(tmp_path):
    one = trajectory()
    forked = replace(one, forks=((TokenSpan.context([1, 2, 5, 6, 7]), one.spans[1]),))
    EpisodeLog(tmp_path).log(1, [Group("p", (forked, one))])
    first, second = read_jsonl(tmp_path / "step-000001.jsonl")
    policy = {"author": "policy", "token_ids": [5, 6], "logprobs": [-0.1, -1 / 3], "version": 11}
    assert first["forks"] == [[{"author": "context", "token_ids": [1, 2, 5, 6, 7]}, policy]]
    assert "forks" not in second and first["spans"] == second["spans"]


def test_a_failed_attempt_has_a_reason_and_no_reward(tmp_path):
    EpisodeLog(tmp_path).log(1, groups(1), [failed()])
    first, *others = read_jsonl(tmp_path / "step-000001.jsonl")
    assert (first["failure"], first["sample"], first["stop_reason"]) == ("the tool broke", 3, "failed")
    assert "reward" not in first and first["messages"] == [{"role": "user", "content": "\ud800?"}]
    assert len(others) == 2


def test_extras_are_stored_as_json_or_as_text(tmp_path):
    extras = {"board": {(0, 1): "x"}, "when": {1, 2}, "plain": [1, None], "nan": float("nan")}
    EpisodeLog(tmp_path).log(1, [Group("p", (trajectory(**extras),))])
    stored = read_jsonl(tmp_path / "step-000001.jsonl")[0]["extras"]
    assert stored["board"] == {"(0, 1)": "x"} and stored["when"] == "{1, 2}" and stored["plain"] == [1, None]


def test_every_k_skips_steps_but_never_evaluations(tmp_path):
    log = EpisodeLog(tmp_path / "some", every=5)
    for step in range(1, 11):
        log.log(step, groups(1))
    log.log(3, groups(1), kind="eval")
    assert names(tmp_path / "some") == ["eval-000003.jsonl", "step-000005.jsonl", "step-000010.jsonl"]
    EpisodeLog(tmp_path / "none", every=0).log(5, groups(1), kind="eval")
    assert names(tmp_path / "none") == []


def test_a_limit_keeps_failures_first_and_then_whole_groups(tmp_path):
    EpisodeLog(tmp_path, max_per_step=5).log(1, groups(8, size=2), [failed()])
    rows = read_jsonl(tmp_path / "step-000001.jsonl")
    assert [row["prompt_id"] for row in rows] == ["p", "p0", "p0", "p1", "p1"]


def test_a_resumed_run_drops_the_episodes_of_repeated_steps(tmp_path):
    log = EpisodeLog(tmp_path)
    for step in (1, 2, 3):
        log.log(step, groups(1))
    log.log(3, groups(1), kind="eval")
    EpisodeLog(tmp_path, resume_step=2)
    assert names(tmp_path) == ["step-000001.jsonl", "step-000002.jsonl"]
    EpisodeLog(tmp_path)
    assert names(tmp_path) == []


def test_each_rank_writes_separate_files(tmp_path):
    for rank in (0, 1):
        EpisodeLog(tmp_path, rank=rank, resume_step=0).log(1, groups(1))
    assert names(tmp_path) == ["step-000001-rank1.jsonl", "step-000001.jsonl"]
    assert [len(read_jsonl(file)) for file in tmp_path.iterdir()] == [2, 2]
