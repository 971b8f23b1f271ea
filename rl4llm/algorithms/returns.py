"""From the rewards of turns to returns and advantages of tokens.

Only the policy's tokens are steps of the decision process. Estimators that treat the environment's tokens as states, or
cut the credit at them, are wrong in multi-turn episodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from rl4llm.algorithms.functional import kl
from rl4llm.algorithms.sequences import Sequences, discounted_sums, policy_tokens, turn_ends
from rl4llm.core.base_algorithm import KLEstimator, Total
from rl4llm.core.types import Group, TrainBatch, Trajectory, count_turns


def played_turns(group: Group) -> Tensor:
    """Return whether a trajectory has a turn (G, K), bool."""
    turns = [trajectory.num_turns for trajectory in group.trajectories]
    return torch.arange(max([1, *turns])) < torch.tensor(turns)[:, None]


def turn_rewards(group: Group) -> Tensor:
    """Return what each turn earned (G, K), float64, 0 after the last turn.

    The reward of the whole episode is added at its last turn, and at the last turn of every fork of its history. The last
    turn of a record also earns what the turns of later records earn that follow it.
    """
    return _earned(group, 1.0)[0]


def turn_returns(group: Group, discount: float) -> Tensor:
    """Return the reward to go at each turn (G, K), discounted per turn; 0 after the last turn.

    In a rewritten history the reward to go counts the turns of the record, and of later ones that follow it.
    """
    return _earned(group, discount)[1]


def _earned(group: Group, discount: float) -> tuple[Tensor, Tensor]:
    """Return the reward of each turn and the reward to go, (G, K) each."""
    rewards_GK = torch.zeros_like(played_turns(group), dtype=torch.float64)
    returns_GK = torch.zeros_like(rewards_GK)
    for row_K, returns_K, trajectory in zip(rewards_GK, returns_GK, group.trajectories, strict=True):
        row_K[: len(trajectory.turn_rewards)] = rewards_GK.new_tensor(trajectory.turn_rewards)
        total = trajectory.reward - sum(trajectory.turn_rewards)
        for start, end, follower in reversed(_records(trajectory)):
            row_K[max(end, 1) - 1] += total if follower is None else discount * returns_K[follower]
            returns_K[start:end] = discounted_sums(row_K[None, start:end], discount)[0]
    return rewards_GK, returns_GK


def _records(trajectory: Trajectory) -> list[tuple[int, int, int | None]]:
    """Return the first turn of each token record, the one after its last, and the one that follows in a later record.

    None follows if the later record is a sub-agent's, begins at an earlier turn, or has no known origin.
    """
    turns = list(map(count_turns, trajectory.records))
    starts = list(itertools.accumulate(turns, initial=0))
    followers = {
        origin.record: start
        for start, origin in zip(starts[1:], trajectory.origins, strict=False)
        if origin and origin.relation != "called" and 0 < origin.turn == turns[origin.record]
    }
    return [(*bounds, followers.get(number)) for number, bounds in enumerate(itertools.pairwise(starts))]


def token_rewards(batch: TrainBatch, kl_coef: float = 0.0, estimator: KLEstimator = "k1") -> Tensor:
    """Return the reward of each token (B, T): a turn's credit at its last token, minus a KL penalty at each token.

    Ouyang et al. 2022 (InstructGPT), equation 2; the penalty is that of the sampling policy.
    """
    rewards_BT = batch.credits_BT * turn_ends(batch)
    if kl_coef == 0.0:
        return rewards_BT
    return rewards_BT - kl_coef * kl(batch.old_logprobs_BT, batch.ref_logprobs_BT, estimator) * batch.mask_BT


def discounted_returns(rewards_BT: Tensor, batch: TrainBatch, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma G_{t+1} (B, T) over the policy's tokens."""
    sequences = Sequences.of(batch)
    return sequences.scatter(discounted_sums(sequences.gather(rewards_BT), gamma), rewards_BT)


def gae(
    rewards_BT: Tensor, values_BT: Tensor, batch: TrainBatch, gamma: float, lam: float | Tensor
) -> Tensor:
    """Return generalized advantage estimates (B, T) over the policy's tokens. Schulman et al. 2016, equation 16.

    `lam` is a number, or one per trajectory in the order of `Sequences.of(batch)`, (S, 1). Episodes end at their last
    token, so there is no bootstrapping.
    """
    sequences = Sequences.of(batch)
    values_SL = sequences.gather(values_BT)
    next_SL = torch.nn.functional.pad(values_SL[:, 1:], (0, 1))
    errors_SL = sequences.gather(rewards_BT) + gamma * next_SL - values_SL
    return sequences.scatter(discounted_sums(errors_SL, gamma * lam), values_BT)


def whiten(batches: Sequence[TrainBatch], total: Total, eps: float = 1e-8) -> None:
    """Give the advantages of all the policy's tokens of a step mean 0 and standard deviation 1, over all ranks.

    (x - mean) / sqrt(var + eps) with the sample variance (ddof 1), as verl, SkyRL and ROLL do.
    """
    flat_N = policy_tokens(batches, [batch.advantages_BT for batch in batches])
    count, summed = total(torch.stack([flat_N.new_tensor(len(flat_N)), flat_N.sum()]))
    mean = summed / count.clamp(min=1)
    variance = total((flat_N - mean).square().sum()) / (count - 1).clamp(min=1)
    for batch in batches:
        white_BT = (batch.advantages_BT - mean) * (variance + eps).rsqrt()
        batch.advantages_BT = white_BT.to(batch.advantages_BT.dtype) * batch.mask_BT
