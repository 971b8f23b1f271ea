"""The losses of pairs, labels and demonstrations equal the reference numbers, values and gradients, in float64."""

import json
import math
from pathlib import Path

import pytest
import torch
from packed import pack

from rl4llm.algorithms import DPO, KTO, SFT, OnlineDPO, RewardModel
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import Group, TokenSpan, TrainBatch, Trajectory
from rl4llm.data.pack import totals_of

GOLDEN = json.loads((Path(__file__).parent / "golden" / "open.json").read_text())
KINDS = ("dpo", "rm", "sft")
QUANTITIES = {entry["name"]: entry for entry in GOLDEN["quantities"] if entry["name"].startswith(KINDS)}
PAIRS = GOLDEN["extra"]["preference_pairs"]
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


def by_trajectory(x_BT, batch):
    """Return one number per trajectory, from numbers that are equal on all its policy tokens."""
    found = []
    for number in range(1, int(batch.segment_ids_BT.max()) + 1):
        own_N = x_BT[batch.mask_BT & (batch.segment_ids_BT == number)]
        assert own_N.max() - own_N.min() < 1e-12
        found.append(own_N[0].item())
    return found


def value_and_gradient(algorithm, batch, numbers_BT):
    numbers_BT = numbers_BT.clone().requires_grad_()
    loss_BT, _ = algorithm.token_losses(batch, numbers_BT, None)
    loss = (loss_BT * batch.weights_BT).sum()
    (gradient_BT,) = torch.autograd.grad(loss, numbers_BT)
    return loss.item(), gradient_BT


def pair_batch(credits=(1.0, -1.0)):
    lengths = PAIRS["length_chosen"] + PAIRS["length_rejected"]
    batch = batch_of(lengths, [credits[0]] * NUM_PAIRS + [credits[1]] * NUM_PAIRS, [*range(NUM_PAIRS)] * 2)
    batch.ref_logprobs_BT = spread(PAIRS["ref_chosen"] + PAIRS["ref_rejected"], batch)
    return batch, spread(PAIRS["policy_chosen"] + PAIRS["policy_rejected"], batch)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("dpo.sigmoid", DPO()),
        ("dpo.label_smoothing", DPO(label_smoothing=0.1)),
        ("dpo.ipo_sum", DPO(loss="ipo")),
        ("dpo.ipo_token_mean", DPO(loss="ipo", length_normalized=True)),
        ("dpo.sigmoid_token_mean", DPO(length_normalized=True)),
    ],
)
def test_dpo_and_its_gradient_equal_the_reference(name, algorithm):
    expected = QUANTITIES[name]["result"]
    batch, logprobs_BT = pair_batch()
    loss, gradient_BT = value_and_gradient(algorithm, batch, logprobs_BT)
    assert loss == pytest.approx(expected["scalar"], abs=1e-9)
    wanted = expected["grad_policy_chosen"] + expected["grad_policy_rejected"]
    assert by_trajectory(gradient_BT, batch) == pytest.approx(wanted, abs=1e-9)
    assert gradient_BT[~batch.mask_BT].abs().max() == 0


@pytest.mark.parametrize("margin", [False, True])
def test_reward_model_loss_and_gradient_equal_the_reference(margin):
    expected = QUANTITIES["rm.pairwise_margin" if margin else "rm.pairwise"]["result"]
    margins = PAIRS["margin"] if margin else [0.0] * NUM_PAIRS
    credits = [1 + one for one in margins] + [-1.0] * NUM_PAIRS
    batch = batch_of([1] * 2 * NUM_PAIRS, credits, [*range(NUM_PAIRS)] * 2)
    rewards_BT = spread(PAIRS["reward_chosen"] + PAIRS["reward_rejected"], batch)
    loss, gradient_BT = value_and_gradient(RewardModel(), batch, rewards_BT)
    assert loss == pytest.approx(expected["scalar"], abs=1e-9)
    wanted = expected["grad_reward_chosen"] + expected["grad_reward_rejected"]
    assert by_trajectory(gradient_BT, batch) == pytest.approx(wanted, abs=1e-9)


def main_trajectories():
    """Return the reference's multi-turn conversations: tokens of the policy between tokens of others."""
    for number, case in enumerate(GOLDEN["cases"]["main"]["trajectories"]):
        # something to begin with, as the first token of some is the policy's
        spans = [TokenSpan.context([9])]
        for sampled in case["mask"]:
            spans.append(TokenSpan((5,), "policy", (0.0,), 0) if sampled else TokenSpan.context([5]))
        yield Trajectory(f"{number}", tuple(spans), (), {}, 0.0, "done")


@pytest.mark.parametrize(
    ("name", "aggregation"), [("sft.token_mean", "token"), ("sft.seq_mean_token_mean", "sequence")]
)
@pytest.mark.parametrize("budget", [20, 1000])
def test_sft_of_packed_multi_turn_rows_equals_the_reference(name, aggregation, budget):
    found = list(main_trajectories())
    batches = pack(
        found, [float(i) for i in range(len(found))], max_tokens_per_batch=budget, layout="packed", aggregation=aggregation,
        totals=totals_of(found), pad_token_id=0,
    )  # fmt: skip
    assert (len(batches) > 1) == (budget == 20)
    cases = GOLDEN["cases"]["main"]["trajectories"]
    expected, total = QUANTITIES[name]["result"], 0.0
    for batch in batches:
        logprobs_BT = torch.zeros_like(batch.weights_BT, dtype=torch.float64)
        wanted_BT = torch.zeros_like(logprobs_BT)
        for segment in range(1, int(batch.segment_ids_BT.max()) + 1):
            own_BT = batch.segment_ids_BT == segment
            owner = int(batch.credits_BT[own_BT & batch.mask_BT][0])
            logprobs_BT[own_BT] = torch.tensor([-3.0, *cases[owner]["new_logprobs"]], dtype=torch.float64)
            wanted_BT[own_BT] = torch.tensor(
                [0.0, *expected["grad_new_logprobs"][owner]], dtype=torch.float64
            )
        batch.weights_BT = batch.weights_BT.double()
        loss, gradient_BT = value_and_gradient(SFT(aggregation=aggregation), batch, logprobs_BT)
        torch.testing.assert_close(gradient_BT, wanted_BT, atol=1e-8, rtol=0)  # weights are float32
        total += loss
    assert total == pytest.approx(expected["scalar"], abs=1e-6)


def kto_oracle(drifts, labels, divergence, beta, desirable, undesirable):
    """Equation 8 of Ethayarajh et al. 2024, a number at a time; the loss, and its derivative by each drift."""
    losses, slopes = [], []
    for drift, good in zip(drifts, labels, strict=True):
        weight, sign = (desirable, 1.0) if good else (undesirable, -1.0)
        value = 1 / (1 + math.exp(-sign * beta * (drift - divergence)))
        losses.append(weight * (1 - value))
        slopes.append(-weight * value * (1 - value) * sign * beta / len(labels))
    return sum(losses) / len(losses), slopes


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.33, 0.7)])
@pytest.mark.parametrize("divergence", [0.0, 1.7])
def test_kto_and_its_gradient_equal_the_formula(weights, divergence):
    policy, reference = (
        PAIRS["policy_chosen"] + PAIRS["policy_rejected"],
        PAIRS["ref_rejected"] + PAIRS["ref_chosen"],
    )
    labels = [True, False, False] * 3 + [True]
    lengths = PAIRS["length_chosen"] + PAIRS["length_rejected"]
    batch = batch_of(lengths, [1.0 if good else -1.0 for good in labels], [*range(len(labels))])
    batch.ref_logprobs_BT = spread(reference, batch)
    batch.divergence = torch.tensor(divergence, dtype=torch.float64)
    algorithm = KTO(beta=0.2, desirable_weight=weights[0], undesirable_weight=weights[1])
    loss, gradient_BT = value_and_gradient(algorithm, batch, spread(policy, batch))
    drifts = [one - other for one, other in zip(policy, reference, strict=True)]
    expected, slopes = kto_oracle(drifts, labels, divergence, 0.2, *weights)
    assert loss == pytest.approx(expected, abs=1e-9)
    assert by_trajectory(gradient_BT, batch) == pytest.approx(slopes, abs=1e-9)


def test_a_repeated_pair_counts_as_two_pairs():
    once, logprobs_BT = pair_batch()
    twice = once.map(lambda x_BT: torch.cat([x_BT, x_BT]))
    twice.weights_BT = twice.weights_BT / 2
    for algorithm in (DPO(), DPO(loss="ipo"), DPO(nll_coef=0.3)):
        loss, gradient_BT = value_and_gradient(algorithm, once, logprobs_BT)
        loss_of_both, gradients_BT = value_and_gradient(
            algorithm, twice, torch.cat([logprobs_BT, logprobs_BT])
        )
        assert loss_of_both == pytest.approx(loss, abs=1e-12)
        torch.testing.assert_close(gradients_BT[:1] + gradients_BT[1:], gradient_BT, atol=1e-12, rtol=0)


def test_chosen_likelihood_is_a_mean_over_tokens_and_over_pairs():
    batch, logprobs_BT = pair_batch()
    without, _ = value_and_gradient(DPO(), batch, logprobs_BT)
    loss, _ = value_and_gradient(DPO(nll_coef=0.5), batch, logprobs_BT)
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


def group(*rewards):
    spans = (TokenSpan.context([1]), TokenSpan((2,), "policy", (-0.5,), 0))
    return Group("p", tuple(Trajectory("p", spans, (), {}, reward, "done") for reward in rewards))


def test_online_dpo_compares_only_the_best_with_the_worst():
    credits = OnlineDPO().credits(group(0.5, 2.0, 0.1, 2.0, 0.1)).tolist()
    assert credits[1:3] == [1.0, -1.0]
    assert all(math.isnan(credit) for credit in (credits[0], *credits[3:]))
    assert OnlineDPO().keep(group(0.0, 1.0))
    assert not OnlineDPO().keep(group(1.0, 1.0))


@pytest.mark.parametrize(
    ("algorithm", "group_size", "word"),
    [
        (DPO(beta=0.0), 8, r"algorithm\.beta=0\.0"),
        (DPO(loss="hinge"), 8, r"algorithm\.loss='hinge' is not accepted: sigmoid or ipo\."),
        (DPO(label_smoothing=0.5), 8, r"algorithm\.label_smoothing=0\.5"),
        (
            DPO(label_smoothing=0.1, loss="ipo"),
            8,
            r"algorithm\.label_smoothing requires algorithm\.loss=sigmoid",
        ),
        (DPO(nll_coef=-1.0), 8, r"algorithm\.nll_coef"),
        (OnlineDPO(), 1, r"rollout\.group_size=1"),
        (OnlineDPO(reference_every=-1), 2, r"algorithm\.reference_every"),
        (KTO(desirable_weight=0.0), 1, r"algorithm\.desirable_weight=0\.0"),
        (
            SFT(learn="asistant"),
            1,
            r"algorithm\.learn='asistant' is not accepted: .* Did you mean 'assistant'",
        ),
    ],
)
def test_impossible_options_are_refused_by_name(algorithm, group_size, word):
    with pytest.raises(ConfigError, match=word):
        algorithm.check(group_size)


def test_every_entry_of_the_reference_is_compared():
    source = Path(__file__).read_text()
    assert not [name for name in QUANTITIES if f'"{name}"' not in source]
    assert len(QUANTITIES) == 9
