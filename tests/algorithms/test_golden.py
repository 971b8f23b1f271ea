"""The formulas equal the reference numbers, values and gradients, in float64."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch

from rl4llm.algorithms import DAPO, GRPO, SFT
from rl4llm.algorithms.functional import group_advantages, kl
from rl4llm.core.types import TrainBatch

GOLDEN = json.loads((Path(__file__).parent / "golden" / "grpo.json").read_text())
QUANTITIES = {entry["name"]: entry for entry in GOLDEN["quantities"]}


def one_row(case: str, key: str) -> torch.Tensor:
    """All trajectories of a case behind one another, (1, T)."""
    rows = [trajectory[key] for trajectory in GOLDEN["cases"][case]["trajectories"]]
    return torch.tensor([list(chain.from_iterable(rows))], dtype=torch.float64)


def batch(case: str = "main") -> TrainBatch:
    mask_BT = one_row(case, "mask").bool()
    zeros_BT = torch.zeros_like(mask_BT, dtype=torch.float64)
    made = TrainBatch(
        token_ids_BT=zeros_BT.long(),
        position_ids_BT=zeros_BT.long(),
        segment_ids_BT=zeros_BT.long() + 1,
        mask_BT=mask_BT,
        sampled_logprobs_BT=one_row(case, "sampled_logprobs"),
        credits_BT=zeros_BT,
        weights_BT=mask_BT.double() / mask_BT.sum(),
    )
    made.old_logprobs_BT = one_row(case, "old_logprobs")
    made.ref_logprobs_BT = one_row(case, "ref_logprobs")
    made.advantages_BT = one_row(case, "token_advantages")
    return made


def expected(name: str, part: str) -> torch.Tensor:
    return torch.tensor([list(chain.from_iterable(QUANTITIES[name]["result"][part]))], dtype=torch.float64)


def value_and_gradient(algorithm, data: TrainBatch):
    logprobs_BT = one_row("main", "new_logprobs").requires_grad_()
    loss_BT, _ = algorithm.token_losses(data, logprobs_BT, None)
    loss = (loss_BT * data.weights_BT).sum()
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    return loss.item(), gradient_BT


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("adv.grpo", True),
        ("adv.dr_grpo", False),
        ("adv.grpo.equal_group", True),
        ("adv.grpo.singleton_zero", True),
    ],
)
def test_advantages_equal_the_reference_for_every_group(name, scale):
    case = GOLDEN["cases"][QUANTITIES[name]["case"]]["trajectories"]
    for group in {trajectory["group"] for trajectory in case}:
        members = [i for i, trajectory in enumerate(case) if trajectory["group"] == group]
        rewards_G = torch.tensor([case[i]["reward"] for i in members], dtype=torch.float64)
        advantages_G = group_advantages(rewards_G, scale=scale)
        for i, advantage in zip(members, advantages_G.tolist(), strict=True):
            per_token, mask = QUANTITIES[name]["result"]["per_token"][i], case[i]["mask"]
            wanted = {value for value, sampled in zip(per_token, mask, strict=True) if sampled}
            assert advantage == pytest.approx(wanted.pop(), abs=1e-9)
            assert not wanted


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_and_their_gradients_equal_the_reference(estimator):
    data = batch()
    logprobs_BT = one_row("main", "new_logprobs").requires_grad_()
    kl_BT = kl(logprobs_BT, data.ref_logprobs_BT, estimator)
    name = f"kl.{estimator}"
    torch.testing.assert_close(
        kl_BT[data.mask_BT].detach(), expected(name, "per_token_kl")[data.mask_BT], atol=1e-9, rtol=0
    )
    (gradient_BT,) = torch.autograd.grad((kl_BT * data.weights_BT).sum(), logprobs_BT)
    torch.testing.assert_close(gradient_BT, expected(name, "grad_new_logprobs"), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("loss.ppo_clip", GRPO()),
        ("loss.ppo_clip_higher", DAPO()),
        ("loss.ppo_clip_plus_k3", GRPO(kl_coef=0.04, kl_estimator="k3")),
        ("sft.token_mean", SFT()),
    ],
)
def test_losses_and_their_gradients_equal_the_reference(name, algorithm):
    loss, gradient_BT = value_and_gradient(algorithm, batch())
    assert loss == pytest.approx(QUANTITIES[name]["result"]["scalar"], abs=1e-9)
    torch.testing.assert_close(gradient_BT, expected(name, "grad_new_logprobs"), atol=1e-9, rtol=0)


def test_k1_as_a_loss_keeps_its_value_and_lowers_the_divergence():
    k1, k1_gradient = value_and_gradient(GRPO(clip_low=1e9, clip_high=1e9, kl_coef=1.0, kl_estimator="k1"), batch())
    k2, k2_gradient = value_and_gradient(GRPO(clip_low=1e9, clip_high=1e9, kl_coef=1.0, kl_estimator="k2"), batch())
    torch.testing.assert_close(k1_gradient, k2_gradient, atol=1e-12, rtol=0)
    difference = QUANTITIES["kl.k1"]["result"]["scalar"] - QUANTITIES["kl.k2"]["result"]["scalar"]
    assert k1 - k2 == pytest.approx(difference, abs=1e-9)
