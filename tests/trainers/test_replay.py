"""Replay: groups of earlier steps in the places of groups without spread, exact, bounded in age, resumable, on any ranks."""

import contextlib
import dataclasses

import pytest
import torch
from ended_runs import TwoTurns, assert_same_weights, metrics, weights
from vowels import prompts

from rl4llm.algorithms.functional import group_advantages
from rl4llm.api import PolicyTrainer
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import ConfigError
from rl4llm.core.images import Image, ImagePlace
from rl4llm.core.types import Group, Origin, TokenSpan, Trajectory
from rl4llm.runtime.ranks import Ranks
from rl4llm.trainers.replay import Replay
from rl4llm.trainers.rl import RLTrainer


class Fading(BaseRewardFunction):
    """How late in the alphabet the last letter comes; in every second step all answers are worth the same."""

    def __init__(self, name="fading", **kwargs):
        super().__init__(name)

    def score_batch(self, samples):
        return [0.5 if step_of(sample) % 2 else letter(sample) for sample in samples]

    def __call__(self, messages, ground_truth, **kwargs):
        raise NotImplementedError


class Twice(Fading):
    """The groups of the first two steps differ."""

    equal_from = 2

    def score_batch(self, samples):
        return [0.5 if step_of(sample) >= self.equal_from else letter(sample) for sample in samples]


class Once(Twice):
    """Only the first step's groups differ."""

    equal_from = 1


class Few(Once):
    """Only those to two of the six prompts, except in the first step."""

    def score_batch(self, samples):
        scores = super().score_batch(samples)
        pairs = zip(samples, scores, strict=True)
        return [letter(sample) if sample.ground_truth in "12" else score for sample, score in pairs]


class Named(PolicyTrainer):
    """Of whatever algorithm the test names."""

    algorithm = "grpo"


def letter(sample):
    return (ord(sample.messages[-1].content[-1:] or "a") % 32) / 32


def step_of(sample):
    return int(sample.session.partition("/")[0])


def made(model_dir, directory, reward=Fading, ranks=None, **options):
    return Named(
        str(model_dir), prompts(), [reward()], output={"dir": str(directory)},
        **{"deterministic": True, "model.autocast": "none", "rollout.prompts": 4 // (ranks.size if ranks else 1),
           "rollout.group_size": 4, "rollout.max_tokens": 5, "training.lr": 3e-3, "training.max_tokens_per_batch": 64,
           "eval.every": 0, "checkpoint.every": 1, "max_steps": 4, "timeout_s": 60,
           "rollout.replay": 8} | options,
    )  # fmt: skip


def train_with(size, run):
    """Train with a store of another size."""
    run.trainer.replay.size = size
    return run.train()


def gradient(loop, updates):
    """Return the gradient of the only update, as a vector."""
    (update,) = updates
    loop.backend.model.zero_grad()
    for batch in update.batches:
        loop.backend.forward_backward(batch, **loop.objective(update))
    parameters = [parameter for _, parameter in loop.backend.model.named_parameters()]
    return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])


def by_hand(model, groups, weight):
    """Return the gradient of the mean over answers of the mean over tokens of -A w, from plain log-probs."""
    model.zero_grad()
    answers = [one for group in groups for one in group.trajectories]
    credits = torch.cat([group_advantages(group.rewards_G) for group in groups])
    for answer, credit in zip(answers, credits, strict=True):
        tokens = torch.tensor(answer.token_ids)
        logprobs_T = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        size = answer.num_policy_tokens
        sampled_T = torch.tensor([number for span in answer.policy_spans for number in span.logprobs])
        loss = -credit * weight(logprobs_T[-size:], sampled_T).mean() / len(answers)
        loss.backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


@pytest.mark.parametrize(
    ("options", "weight"),
    [
        ({"old_logprobs": "sampled", "clip_low": 9.0, "clip_high": 9.0}, lambda z, m: (z - m).exp()),
        ({}, lambda z, m: z * (z - m).exp().clamp(max=1.5).detach()),
        ({"old_logprobs": "recomputed", "correction": "is"}, lambda z, m: z * (z - m).exp().detach()),
    ],
    ids=["ratio", "default", "importance"],
)
def test_a_replayed_group_trains_as_its_log_probs_say(model_dir, tmp_path, options, weight):
    """Its gradient is that of the group itself, off-policy, and that of the formula."""
    keys = {"algorithm": {"name": "grpo", **options}, "training.lr": 3e-2}
    with contextlib.closing(made(model_dir, tmp_path, **keys).trainer) as loop:
        loop.resume()
        loop.publish()
        first = loop.collect()
        for update in loop.prepare(first):
            loop.update(update, first)
        loop.step += 1
        loop.publish()
        second = loop.collect()
        assert not any(map(loop._trains, second.groups)) and len(loop.replayed) == len(first.groups) == 4
        replayed = gradient(loop, loop.prepare(second))
        assert len(second.credits) == len(second.groups)
        by_id = {group.prompt_id: group for group in first.groups}
        groups = [by_id[group.prompt_id] for group in loop.replayed]
        direct = gradient(loop, loop.preparation.prepare(groups, loop.step).updates)
        formula = by_hand(loop.backend.model, groups, weight)
        on_policy = by_hand(loop.backend.model, groups, lambda z, m: z)
    assert torch.equal(replayed, direct)
    torch.testing.assert_close(replayed, formula, rtol=1e-3, atol=1e-5 * float(formula.abs().max()))
    assert float((on_policy - formula).norm() / formula.norm()) > 0.02  # ratios that matter


def test_stored_groups_train_once_more_until_they_are_too_old(model_dir, tmp_path):
    train_with(3, made(model_dir, tmp_path / "run", Once))
    rows = metrics(tmp_path / "run")
    assert [row["replay/groups"] for row in rows] == [0, 3, 0, 0]
    assert [row["replay/age"] for row in rows] == [0, 1, 0, 0]
    assert ["mismatch/max" in row for row in rows] == [True, False, False, False]  # of new tokens only
    assert ["update/empty" in row for row in rows] == [False, False, True, True]
    assert all(row["trajectories"] == 16 for row in rows)  # of what was sampled
    train_with(8, made(model_dir, tmp_path / "bound", Twice, **{"rollout.replay": 1}))
    rows = metrics(tmp_path / "bound")
    assert [row["replay/groups"] for row in rows] == [0, 0, 4, 0]  # of 8 stored, 4 are young enough
    assert [row["replay/age"] for row in rows] == [0, 0, 1, 0]


def test_a_resumed_run_replays_what_was_stored(model_dir, tmp_path):
    keys = {"env": TwoTurns, "env.max_steps": 2}
    whole = made(model_dir, tmp_path / "whole", **keys).train()
    made(model_dir, tmp_path / "parts", **keys, max_steps=1).train()
    parts = made(model_dir, tmp_path / "parts", **keys).train()
    assert [row["replay/groups"] for row in metrics(tmp_path / "parts")] == [0, 4, 0, 4]
    assert_same_weights(weights(whole), weights(parts))


def test_places_left_by_dynamic_sampling_are_filled(model_dir, tmp_path):
    keys = {"algorithm": {"name": "dapo", "resampling_rounds": 1}, "max_steps": 3}
    made(model_dir, tmp_path / "run", Few, **keys).train()
    rows = metrics(tmp_path / "run")
    trained = [row["trajectories"] / 4 - row["groups/dropped"] for row in rows]
    assert trained[0] == 4 and any(
        0 < count < 4 and row["groups/refills"] for count, row in zip(trained, rows, strict=True)
    )
    assert [row["replay/groups"] for row in rows] == [4 - count for count in trained]


def trained(ranks, model_dir, directory, max_steps):
    run = train_with(3, made(model_dir, directory, ranks=ranks, max_steps=max_steps)).trainer
    return {name: tensor.clone() for name, tensor in run.backend.weights()}


def test_any_ranks_replay_the_groups_of_one(on_ranks, model_dir, tmp_path):
    """Two ranks take the steps of one; then one takes over what both stored."""
    whole = trained(Ranks(), model_dir, tmp_path / "one", 4)
    on_ranks(trained, model_dir, tmp_path / "two", 3)
    parts = trained(Ranks(), model_dir, tmp_path / "two", 4)
    counts = [[row["replay/groups"] for row in metrics(tmp_path / name)] for name in ("one", "two")]
    assert counts[0] == counts[1] == [0, 3, 0, 3]
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=1e-4, rtol=0)


def group(name, version=0, reward=1.0, **fields):
    spans = (TokenSpan.context([1, 2]), TokenSpan((3, 4), "policy", (-0.5, -0.25), version))
    one = Trajectory(name, spans, (), {"a": reward}, reward, "done", {"sample": 0}, **fields)
    return Group(name, (one, dataclasses.replace(one, reward=0.0)))


def test_the_best_groups_stay_and_leave_first():
    replay = Replay(3, 2, Ranks())
    replay.add([(0.5, group("a")), (0.9, group("b")), (0.9, group("c", 1)), (0.1, group("d", 1))])
    assert [one.group.prompt_id for one in replay.stored] == ["c", "b", "a"]
    assert replay.take(0, 1) == []
    assert [one.group.prompt_id for one in replay.take(1, 2)] == ["c"]
    assert [one.group.prompt_id for one in replay.take(9, 3)] == []  # of version 0, for version 3


def test_a_stored_group_comes_back_equal(tmp_path):
    place = ImagePlace(Image("ab" * 32, 28, 28), 0, 2)
    fork = (TokenSpan.context([1, 2], [place]), TokenSpan((5,), "policy", (-0.1,), 1))
    whole = group("a", 1, turn_rewards=(0.5, 0.5), forks=(fork,), origins=(Origin("rewrites", 0, 1),), role="pro",
                  part="sums", successes={"a": True})  # fmt: skip
    whole = dataclasses.replace(whole, baseline=whole.trajectories[0])
    replay, again, other = (Replay(8, 8, Ranks()) for _ in range(3))
    replay.add([(1 / 3, whole), (0.2, group("b"))])
    replay.write(tmp_path)
    again.read(tmp_path)
    assert [one.group for one in again.stored] == [one.group for one in replay.stored]
    assert [one.key for one in again.stored] == [one.key for one in replay.stored]
    (tmp_path / "replay-1.jsonl").write_text((tmp_path / "replay-0.jsonl").read_text())  # of two ranks
    other.read(tmp_path)
    assert len(other.stored) == 4


def test_replay_needs_an_algorithm_that_only_compares(model_dir, tmp_path):
    with pytest.raises(ConfigError):
        made(model_dir, tmp_path / "ppo", algorithm={"name": "ppo"})
    shared = {"name": "sdpo", "distill_coef": 0.5}  # compares a group, and learns from the teacher in any
    with pytest.raises(ConfigError):
        made(model_dir, tmp_path / "sdpo", algorithm=shared)
    with contextlib.closing(
        made(model_dir, tmp_path / "none", algorithm=shared, **{"rollout.replay": 0}).trainer
    ):
        pass
    off = made(model_dir, tmp_path / "off", **{"rollout.replay": 0}).trainer
    with contextlib.closing(off):
        assert type(off) is RLTrainer and off.algorithm.old_logprobs == "sampled"
