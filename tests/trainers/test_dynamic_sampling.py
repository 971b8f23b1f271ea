"""Dynamic sampling: prompts are sampled in place of groups that teach nothing, never without end, never in silence."""

import pytest
import torch
from ended_runs import metrics
from vowels import Vowels, prompts

from rl4llm.api import DAPOTrainer
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.tracking.tracker import read_jsonl


class SomeEqual(Vowels):
    """All answers to odd prompts are worth the same."""

    def __call__(self, messages, ground_truth, **kwargs):
        return (
            0.7
            if int(ground_truth) % 2
            else super().__call__(messages, ground_truth) + 1e-3 * len(messages[-1].content)
        )


class AllEqual(BaseRewardFunction):
    """Every answer is worth the same."""

    def __init__(self, name="equal", **kwargs):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs):
        return 0.7


def made(model_dir, directory, reward, max_steps=1, num_rows=8, **algorithm):
    return DAPOTrainer(
        str(model_dir),
        prompts(num_rows),
        [reward],
        algorithm=algorithm,
        rollout={"prompts": 4, "group_size": 4, "max_tokens": 5},
        training={"lr": 3e-3},
        output={"dir": str(directory)},
        max_steps=max_steps,
        deterministic=True,
    )


def run(model_dir, directory, reward, max_steps=2, **algorithm):
    trainer = made(model_dir, directory, reward, max_steps, **algorithm)
    before = {name: tensor.clone() for name, tensor in trainer.trainer.backend.weights()}
    trainer.train()
    moved = any(not torch.equal(tensor, before[name]) for name, tensor in trainer.trainer.backend.weights())
    return moved, metrics(directory)


def episodes(directory, step):
    return read_jsonl(directory / "episodes" / f"step-{step:06d}.jsonl")


@pytest.mark.parametrize("resampling_rounds", [0, 1, 3])
def test_dynamic_sampling_ends_after_the_maximum_of_rounds(model_dir, tmp_path, resampling_rounds):
    moved, rows = run(model_dir, tmp_path, AllEqual(), resampling_rounds=resampling_rounds)
    assert not moved
    assert len(rows) == 2
    for row in rows:
        assert row["trajectories"] == (1 + resampling_rounds) * 4 * 4
        assert row["reward/mean"] == pytest.approx(0.7)  # of what was sampled, not 0 of what was kept
        assert row["groups/zero_spread"] == 1
        assert row["update/empty"] == 1
        assert "loss" not in row
        if resampling_rounds:
            assert row["groups/refills"] == resampling_rounds
            assert row["groups/dropped"] == (1 + resampling_rounds) * 4
        drawn = episodes(tmp_path, row["step"])
        assert len(drawn) == row["trajectories"]
        # no sample is drawn twice
        assert len({(one["prompt_id"], one["sample"]) for one in drawn}) == len(drawn)


def test_dropped_groups_are_replaced_until_the_step_is_full(model_dir, tmp_path):
    moved, rows = run(model_dir, tmp_path, SomeEqual(), max_steps=3, resampling_rounds=10)
    assert moved
    for row in rows:
        played = row["trajectories"] / 4
        assert 0 < row["groups/refills"] < 10
        assert row["groups/dropped"] == played - 4  # what trained is what was wanted
        assert row["reward/mean"] > 0.7 * row["groups/dropped"] / played > 0  # of the dropped ones too
        assert row["groups/zero_spread"] == pytest.approx(row["groups/dropped"] / played)
        assert "update/empty" not in row


def test_without_refills_a_step_trains_on_what_is_left(model_dir, tmp_path):
    moved, rows = run(model_dir, tmp_path, SomeEqual(), max_steps=1, resampling_rounds=0)
    assert moved
    (row,) = rows
    assert row["trajectories"] == 16
    assert "groups/refills" not in row
    assert 0 < row["groups/zero_spread"] < 1


def test_a_step_that_filters_all_groups_does_not_divide_by_zero(model_dir, tmp_path):
    for number, aggregation in enumerate(("token", "sequence", "prompt", "constant")):
        options = {
            "aggregation": aggregation,
            "whiten": True,
            "scale_rewards": "batch",
            "resampling_rounds": 1,
        }
        moved, rows = run(model_dir, tmp_path / str(number), AllEqual(), max_steps=1, **options)
        assert not moved
        assert rows[0]["update/empty"] == 1


def test_no_two_draws_of_a_row_in_a_step_are_the_same_draw(model_dir, tmp_path):
    loop = made(model_dir, tmp_path, AllEqual(), num_rows=2, resampling_rounds=2).trainer
    loop.publish()
    members = [member for group in loop.collect().groups for member in group.trajectories]
    loop.close()
    assert len(members) == 3 * 4 * 4
    assert len({(member.prompt_id, member.extras["sample"]) for member in members}) == len(members)
