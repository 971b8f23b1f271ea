"""What an algorithm needs, the trainer provides: a critic, a reference that follows, a greedy baseline, ladders, turns."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from ended_runs import TwoTurns, assert_same_weights, metrics
from vowels import Vowels, prompts

from rl4llm.algorithms import GRPO
from rl4llm.api import PolicyTrainer
from rl4llm.backends.classifier import load_value_head
from rl4llm.backends.models import load_model
from rl4llm.core.errors import ConfigError, EnvError
from rl4llm.core.types import SamplingParams


class PaidTurns(TwoTurns):
    """Pay 1 for the first turn and 0.25 for the second, before the reward of the episode."""

    def respond(self, sample):
        sample.reward_turn([1, 0.25][sample.current_step - 1])
        return super().respond(sample)


class Any(PolicyTrainer):
    """Of whatever algorithm the test names."""

    algorithm = "grpo"


def trainer(model_dir, directory, algorithm, env=TwoTurns, **overrides):
    options = {
        "rollout": {"prompts": 2, "group_size": 4, "max_tokens": 5},
        "training": {"lr": 3e-3},
        "checkpoint": {"every": 2},
        "env.max_steps": 2,
        "deterministic": True,
        "max_steps": 4,
    }
    output = {"dir": str(directory)}
    return Any(
        str(model_dir),
        prompts(4),
        [Vowels()],
        algorithm=algorithm,
        env=env,
        output=output,
        **options | overrides,
    )


def weights(backend):
    return {name: tensor.clone() for name, tensor in backend._tensors().items()}


def episodes(directory, step):
    return [
        json.loads(line)
        for line in (directory / "episodes" / f"step-{step:06d}.jsonl").read_text().splitlines()
    ]


def differ(left, right):
    return any(not torch.equal(tensor, right[name]) for name, tensor in left.items())


PPO = {"name": "ppo", "critic_lr": 1e-2, "kl_coef": 0.1, "kl_target": 0.01, "critic_passes": 2}


@pytest.mark.parametrize(("critic_lr", "used"), [(7e-3, 7e-3), (None, 3e-2)])
def test_critic_lr_trains_the_critic_and_is_logged(critic_lr, used, model_dir, tmp_path):
    """A first step of Adam moves the weights by the learning rate; the critic's default is ten times the policy's."""
    algorithm = {"name": "ppo", "critic_lr": critic_lr}
    run = trainer(model_dir, tmp_path, algorithm, max_steps=1)
    models = {"critic/": run.trainer.critic, "": run.trainer.backend}
    before = {
        name: [parameter.detach().clone() for parameter in model.stepped.values()]
        for name, model in models.items()
    }
    run.train()
    (row,) = metrics(tmp_path)
    for name, lr in (("critic/", used), ("", 3e-3)):
        assert row[f"{name}lr"] == lr
        moved = [
            (new.detach() - old).abs().max().item()
            for new, old in zip(models[name].stepped.values(), before[name], strict=True)
        ]
        assert max(moved) == pytest.approx(lr, rel=0.02)


def test_in_the_warm_up_only_the_critic_learns(model_dir, tmp_path):
    run = trainer(model_dir, tmp_path, PPO | {"critic_warmup_steps": 2}, max_steps=2).trainer
    policy, critic = weights(run.backend), weights(run.critic)
    with run:
        run.train()
    assert_same_weights(policy, weights(run.backend))
    assert differ(critic, weights(run.critic))
    assert all("critic/value_loss" in row and "policy_loss" not in row for row in metrics(tmp_path))


@pytest.mark.parametrize(
    "algorithm",
    [
        PPO,
        {"name": "grpo", "kl_coef": 0.1, "reference_every": 3},
        {"name": "sdpo", "teacher": "ema", "solved_at": 0.15},
    ],
    ids=["ppo", "grpo", "sdpo"],
)
def test_a_resumed_run_restores_critic_reference_and_coefficient(model_dir, tmp_path, algorithm):
    whole = trainer(model_dir, tmp_path / "whole", algorithm, max_steps=6).train().trainer
    trainer(model_dir, tmp_path / "parts", algorithm, max_steps=4).train()
    parts = trainer(model_dir, tmp_path / "parts", algorithm, max_steps=6).train().trainer
    for name in whole.models():
        assert_same_weights(weights(whole.models()[name]), weights(parts.models()[name]))
    assert whole.algorithm.state() == parts.algorithm.state()


def test_the_critic_of_a_finished_run_is_one_to_start_from(model_dir, tmp_path):
    done = (
        trainer(model_dir, tmp_path / "values", PPO | {"critic_warmup_steps": 2}, max_steps=2).train().trainer
    )
    critic = tmp_path / "values" / "model" / "critic"
    head = load_value_head(critic, load_model(critic, values=True))
    assert torch.equal(head.linear.weight, done.critic.value_head.linear.weight.cpu())
    following = trainer(model_dir, tmp_path / "next", PPO | {"critic_path": str(critic)}).trainer
    assert_same_weights(weights(done.critic), weights(following.critic))
    following.close()


def test_the_reference_follows_the_policy_every_n_steps(model_dir, tmp_path):
    run = trainer(model_dir, tmp_path, {"name": "grpo", "kl_coef": 0.1, "reference_every": 2}, max_steps=3)
    reference = run.trainer.preparation.reference
    start = weights(reference)
    run.train()
    kept = dict(run.trainer.backend.weights())
    assert differ(start, weights(reference))
    # step 3 moved the policy on
    assert differ({name: tensor.clone() for name, tensor in reference.weights()}, kept)
    measured = [row["kl"] for row in metrics(tmp_path)]
    assert measured[1] > 1e-7
    assert measured[2] == pytest.approx(0, abs=1e-6)


def test_an_adaptive_coefficient_rises_above_its_target(model_dir, tmp_path):
    algorithm = {"name": "grpo", "kl_coef": 1e-3, "kl_target": 1e-9, "kl_horizon": 1}
    run = trainer(model_dir, tmp_path, algorithm).train().trainer
    # the first step is on the reference
    assert run.algorithm.state()["kl_factor"] == pytest.approx(0.8 * 1.2**3)


def test_the_greedy_baseline_is_most_probable_and_never_trains(model_dir, tmp_path):
    run = trainer(model_dir, tmp_path, {"name": "remax"}).trainer
    run.publish()
    collected = run.collect()
    greedy = run.rollout.play(
        [int(group.prompt_id) for group in collected.groups],
        step=run.step, sampling_params=SamplingParams(max_tokens=5, temperature=0.0), group_size=1,
    )  # fmt: skip
    for group, alone in zip(collected.groups, greedy.groups, strict=True):
        assert group.baseline.token_ids == alone.trajectories[0].token_ids
        assert len(group.trajectories) == 4
        expected = group.rewards_G - group.baseline.reward
        assert torch.equal(run.algorithm.credits(group), expected)
    assert sum(
        int(batch.mask_BT.sum()) for update in run.prepare(collected) for batch in update.batches
    ) <= sum(trajectory.num_policy_tokens for group in collected.groups for trajectory in group.trajectories)
    run.close()


def test_samples_are_drawn_at_the_temperatures_of_their_rung(model_dir, tmp_path):
    algorithm = {"name": "explore_grpo", "temperatures": [1e-6, 1.0], "correction": "token_mask"}
    run = trainer(model_dir, tmp_path, algorithm).trainer
    run.publish()
    for group in run.collect().groups:
        cold, one, again, other = (trajectory.token_ids for trajectory in group.trajectories)
        assert cold == again  # at a temperature of almost 0 there is one answer
        assert one != other
    run.close()


def test_a_turn_is_paid_and_credited_by_itself(model_dir, tmp_path):
    run = trainer(
        model_dir, tmp_path, {"name": "grpo", "turn_discount": 0.5}, env=PaidTurns, **{"env.max_steps": 2}
    )
    run.train()
    for row in episodes(tmp_path, 1):
        assert row["reward"] == pytest.approx(row["rewards"]["vowels"] + 1.25)
        assert len(row["credit"]) == 2
    assert any(row["credit"][0] != row["credit"][1] for row in episodes(tmp_path, 1))


def test_reward_turn_accepts_only_numbers(model_dir, tmp_path):
    class Wrong(TwoTurns):
        def respond(self, sample):
            sample.reward_turn(float("nan"))
            return super().respond(sample)

    with pytest.raises(EnvError):
        trainer(model_dir, tmp_path, {"name": "grpo"}, env=Wrong).train()


@dataclass(slots=True)
class Curious(GRPO):
    """GRPO whose advantages grow with the entropy of each token."""

    def needs(self):
        return replace(GRPO.needs(self), old_entropy=True)

    def advantages(self, batch):
        return batch.credits_BT + 0.4 * batch.old_entropy_BT


@pytest.mark.parametrize("layout", ["sorted", "packed", "shared"])
def test_an_advantage_reads_the_entropy_before_the_updates(model_dir, tmp_path, layout):
    training = {"lr": 0.1, "passes_per_rollout": 2, "layout": layout}
    rollout = {"prompts": 2, "group_size": 4, "max_tokens": 5, "temperature": 0.7}
    algorithm = {"name": f"{__name__}:Curious"}
    with trainer(model_dir, tmp_path, algorithm, training=training, rollout=rollout).trainer as run:
        run.publish()
        step = run.collect()
        before, after = run.prepare(step)
        run.update(before, step)  # changes the policy, but not the advantages of the second epoch
        model = load_model(str(model_dir), dtype="float32", device="cpu")
        for batch in after.batches:
            records_N = batch.record_ids_BT[batch.mask_BT].tolist()
            places_N = batch.position_ids_BT[batch.mask_BT].tolist()
            expected_N = []
            for record, place in zip(records_N, places_N, strict=True):
                ids_T = [token for span in after.records[record] for token in span.token_ids]
                logits_V = model(input_ids=torch.tensor([ids_T[:place]])).logits[0, -1].double() / 0.7
                expected_N.append(torch.distributions.Categorical(logits=logits_V).entropy().item())
            bonus_BT = batch.advantages_BT - batch.credits_BT
            assert bonus_BT[batch.mask_BT].tolist() == pytest.approx(
                [0.4 * one for one in expected_N], rel=1e-4
            )
            assert max(expected_N) > 1.01 * min(expected_N) > 0


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "dapo", "filter_groups_by": "accuracy"},
        {"name": "grpo", "critic_lr": 0.1},
        {"name": "grpo", "dual_clip": 0.5},
        {"name": "grpo", "reference_every": 5},
        {"name": "grpo", "correction": "tiss", "old_logprobs": "recomputed"},
        {"name": "grpo", "aggregation": "tokens"},
        {"name": "ppo", "turn_discount": 0.9},
        {"name": "distill", "teacher_path": "t", "kl_coef": 0.1},
        {"name": "sdft", "template": "{prompt}"},
        {"name": "sdpo", "teacher_rate": 0},
        {"name": "rloo", "scale_rewards": "group"},
        {"name": "explore_grpo", "temperatures": [0.0]},
        {"name": "explore_grpo", "correction": None},
    ],
    ids=lambda algorithm: "-".join(map(str, algorithm.values())),
)
def test_conflicting_options_are_refused_before_anything_starts(model_dir, tmp_path, algorithm):
    with pytest.raises(ConfigError):
        trainer(model_dir, tmp_path / "run", algorithm)
    assert not (tmp_path / "run").exists()
