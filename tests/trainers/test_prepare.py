"""What optimizer steps are made of: every token in its turn, credits in proportion to rewards, penalties of all records."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from invariance import TABLE, TableBackend, groups, sampled_table, table

from rl4llm.algorithms import ALGORITHMS, GRPO, OnlineDPO
from rl4llm.core.types import TokenSpan
from rl4llm.data.pack import Batching
from rl4llm.trainers.prepare import Preparation


def prepared(algorithm, found, **batching):
    """Return what a step prepares from these groups; each token has its own log-prob in each model."""
    sampled = sampled_table(found)
    options = {"max_tokens_per_batch": 40, "usual_tokens_per_batch": 40, "constant_length": 18} | batching
    return Preparation(
        algorithm=algorithm,
        policy=TableBackend(sampled),
        reference=TableBackend(sampled + table(5)),
        batching=Batching("packed", algorithm.aggregation, pad_token_id=TABLE - 1, **options),
    ).prepare(found, 0)


def with_rewards(found, change):
    """Return the groups with other rewards, of episodes alone."""

    def changed(one):
        return replace(one, reward=change(one.reward), turn_rewards=())

    return [replace(group, trajectories=tuple(map(changed, group.trajectories))) for group in found]


@pytest.mark.parametrize(("passes", "updates"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_every_policy_token_is_in_as_many_updates_as_passes(passes, updates):
    found = groups()
    seen = Counter()
    for update in prepared(GRPO(), found, passes_per_rollout=passes, updates_per_rollout=updates).updates:
        for batch in update.batches:
            assert (batch.weights_BT[batch.mask_BT] > 0).all()
            seen.update(batch.token_ids_BT[batch.mask_BT].tolist())
    policy = [
        token
        for one in found
        for each in one.trajectories
        for span in each.policy_spans
        for token in span.token_ids
    ]
    assert seen == dict.fromkeys(policy, passes)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "reinforce_pp"])
@pytest.mark.parametrize("scale", [1e-3, 1e-6])
def test_small_differences_of_rewards_train_in_proportion(name, scale):
    algorithm = ALGORITHMS[name](**({"whiten": False} if name == "reinforce_pp" else {}))

    def advantages(scale):
        found = with_rewards(groups(), lambda reward: scale * reward)
        batches = [batch for update in prepared(algorithm, found).updates for batch in update.batches]
        tokens = [
            (batch.token_ids_BT[batch.mask_BT], (batch.advantages_BT * batch.weights_BT)[batch.mask_BT])
            for batch in batches
        ]
        numbers = torch.zeros(TABLE, dtype=torch.float64)
        for ids_N, advantages_N in tokens:
            numbers[ids_N] = advantages_N.double()
        return numbers

    whole = advantages(1.0)
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(advantages(scale) / scale, whole, rtol=1e-5, atol=0)


def test_the_penalty_of_a_forked_episode_counts_all_its_records():
    found, beyond = groups(), TABLE - 50  # ids that no other token has
    fork = (TokenSpan.context([3]), TokenSpan((beyond, beyond + 1), "policy", (-0.5, -1.5), 0))
    whole = found[1].trajectories
    found[1] = replace(found[1], trajectories=(whole[0], replace(whole[1], forks=(fork,)), *whole[2:]))
    algorithm, apart = GRPO(kl_coef=0.5, kl_in="reward", kl_estimator="k1", scale_rewards="none"), table(5)
    every = [
        span for group in found for one in group.trajectories for record in one.records for span in record
    ]
    assert len(every) > len([span for group in found for one in group.trajectories for span in one.spans])

    def penalty(one):
        tokens = [
            token
            for record in one.records
            for span in record
            if span.author == "policy"
            for token in span.token_ids
        ]
        return -apart[tokens].sum().item()  # policy less reference, as k1 counts

    result = prepared(algorithm, found)
    for group, credits in zip(found, result.credits, strict=True):
        rewards = [one.reward - 0.5 * penalty(one) for one in group.trajectories]
        mean = sum(rewards) / len(rewards)
        assert credits == pytest.approx([reward - mean for reward in rewards], abs=1e-5)
    members = [one for group in found for one in group.trajectories]
    assert result.metrics["reward/kl"] == pytest.approx(sum(map(penalty, members)) / len(members), abs=1e-6)


@pytest.mark.parametrize("algorithm", [GRPO(aggregation="prompt"), OnlineDPO()])
def test_two_draws_of_a_prompt_are_two_groups(algorithm):
    """Each has its share of the loss and its pair, though the prompt and its id are the same."""
    twice = groups()  # the last one is of the first prompt again
    apart = [
        replace(group, prompt_id=str(i), trajectories=tuple(replace(one, prompt_id=str(i)) for one in group.trajectories))
        for i, group in enumerate(twice)
    ]  # fmt: skip
    found = []
    for drawn in (twice, apart):
        (update,) = prepared(
            algorithm, drawn, whole_groups=algorithm.needs().whole_groups, max_tokens_per_batch=10**5
        ).updates
        (batch,) = update.batches
        found.append((batch.group_ids_BT[batch.mask_BT].unique().numel(), batch.weights_BT))
    assert found[0][0] == found[1][0] == len(twice)
    torch.testing.assert_close(found[0][1], found[1][1])
