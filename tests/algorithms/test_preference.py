"""What pairs add to a loss and measure, and which options of methods for data are refused; test_golden has their numbers."""

import pytest
import torch
from golden_numbers import EXTRA

from rl4llm.algorithms import DPO
from rl4llm.core.types import TrainBatch

PAIRS = EXTRA["preference_pairs"]
NUM_PAIRS = len(PAIRS["margin"])


def batch_of(lengths, credits, groups, context=2):
    """Put trajectories into one row, each with a few tokens of context before those of the policy."""
    sizes = [context + length for length in lengths]
    owner_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(sizes))
    mask_T = torch.cat([torch.arange(size) >= context for size in sizes])
    weights_S = torch.tensor([1 / (length * len(lengths)) for length in lengths], dtype=torch.float64)
    credits_S = torch.tensor(credits, dtype=torch.float64)
    zeros_BT = torch.zeros(1, len(owner_T), dtype=torch.float64)
    return TrainBatch(
        token_ids_BT=zeros_BT.long(),
        position_ids_BT=zeros_BT.long(),
        segment_ids_BT=owner_T[None] + 1,
        mask_BT=mask_T[None],
        sampled_logprobs_BT=zeros_BT,
        credits_BT=(credits_S[owner_T] * mask_T)[None],
        weights_BT=(weights_S[owner_T] * mask_T)[None],
        group_ids_BT=torch.tensor(groups)[owner_T][None],
        later={"ref_logprobs_BT": zeros_BT},
    )


def spread(sums, batch):
    """Return numbers (1, T) on the policy's tokens whose sums over trajectories are `sums`; garbage on all other tokens."""
    numbers_BT = torch.full_like(batch.weights_BT, -7.0)
    for number, total in enumerate(sums, start=1):
        own_BT = batch.mask_BT & (batch.segment_ids_BT == number)
        share_N = torch.rand(int(own_BT.sum()), dtype=torch.float64) + 0.1
        numbers_BT[own_BT] = total * share_N / share_N.sum()
    return numbers_BT


def loss_of(algorithm, batch, numbers_BT):
    return (algorithm.token_losses(batch, numbers_BT, None)[0] * batch.weights_BT).sum().item()


def pair_batch():
    lengths = PAIRS["length_chosen"] + PAIRS["length_rejected"]
    batch = batch_of(lengths, [1.0] * NUM_PAIRS + [-1.0] * NUM_PAIRS, [*range(NUM_PAIRS)] * 2)
    batch.ref_logprobs_BT = spread(PAIRS["ref_chosen"] + PAIRS["ref_rejected"], batch)
    return batch, spread(PAIRS["policy_chosen"] + PAIRS["policy_rejected"], batch)


def test_chosen_likelihood_is_a_mean_over_tokens_and_over_pairs():
    batch, logprobs_BT = pair_batch()
    without = loss_of(DPO(), batch, logprobs_BT)
    loss = loss_of(DPO(nll_coef=0.5), batch, logprobs_BT)
    means = [
        total / length for total, length in zip(PAIRS["policy_chosen"], PAIRS["length_chosen"], strict=True)
    ]
    assert loss - without == pytest.approx(-0.5 * sum(means) / NUM_PAIRS, abs=1e-9)


def test_pair_metrics_are_means_over_pairs_of_any_length():
    batch, logprobs_BT = pair_batch()
    _, metrics = DPO().token_losses(batch, logprobs_BT, None)
    found = {name: (metric_BT * batch.weights_BT).sum().item() for name, metric_BT in metrics.items()}
    names = ("policy_chosen", "ref_chosen", "policy_rejected", "ref_rejected")
    margins = [a - b - (c - d) for a, b, c, d in zip(*(PAIRS[name] for name in names), strict=True)]
    assert found["dpo/accuracy/weighted"] == pytest.approx(sum(margin > 0 for margin in margins) / NUM_PAIRS)
    assert found["dpo/margin/weighted"] == pytest.approx(0.1 * sum(margins) / NUM_PAIRS)
    chosen = [a - b for a, b in zip(PAIRS["policy_chosen"], PAIRS["ref_chosen"], strict=True)]
    assert found["dpo/chosen/weighted"] == pytest.approx(0.1 * sum(chosen) / NUM_PAIRS)
