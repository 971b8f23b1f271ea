"""What a GRPOConfig becomes has the loss and the gradient of TRL's formulas, written down here as TRL 1.16 computes them."""

import pytest
import torch
from packed import pack

from rl4llm.algorithms import ALGORITHMS
from rl4llm.core.types import Group, TokenSpan, Trajectory
from rl4llm.data.pack import totals_of
from rl4llm_compat.trl import GRPOConfig
from rl4llm_compat.trl.script import Script

LENGTHS = (3, 5, 2, 6, 1, 4, 4, 2)  # two groups of four
REWARDS = (
    100.0,
    -50.0,
    20.0,
    180.0,
    0.0,
    0.0,
    90.0,
    -30.0,
)  # so large that what is added to deviations does not show
TRUNCATED = (3, 6)
GROUP = 4


@pytest.fixture
def numbers():
    """New, old and reference log-probs of each token, far enough apart that clips bind on both sides."""
    torch.manual_seed(0)
    old = torch.randn(sum(LENGTHS), dtype=torch.float64) - 2
    new = old + 0.4 * torch.randn_like(old)
    return new.requires_grad_(), old, old + 0.3 * torch.randn_like(old)


def trajectories():
    start, made = 100, []
    for number, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        spans = (
            TokenSpan.context([1, 2]),
            TokenSpan(range(start, start + length), "policy", (0.0,) * length, 0),
        )
        stop = "length" if number in TRUNCATED else "done"
        made.append(Trajectory(f"p{number // GROUP}", spans, (), {}, reward, stop))
        start += length
    return made


def ours(arguments, new, old, ref):
    config = GRPOConfig(
        "out", num_generations=GROUP, per_device_train_batch_size=8, max_completion_length=9, **arguments
    )
    config.max_steps = 10
    keys = Script("grpo", {"args": config}).keys(None, {})
    options = {
        key.removeprefix("algorithm."): value for key, value in keys.items() if key.startswith("algorithm.")
    }
    algorithm = ALGORITHMS[options.pop("name")](**options)
    algorithm.check(GROUP)
    members = trajectories()
    groups = [Group(f"p{i}", tuple(members[i * GROUP : (i + 1) * GROUP])) for i in range(2)]
    credits = torch.cat(algorithm.batch_credits(groups, lambda tensor: tensor)).tolist()
    kept = [number for number, member in enumerate(members) if algorithm.learns_from(member)]
    batches = pack(
        [members[number] for number in kept],
        [credits[number] for number in kept],
        max_tokens_per_batch=1000,
        layout="packed",
        aggregation=algorithm.aggregation,
        totals=totals_of([members[number] for number in kept]),
        constant_length=keys.get("training.constant_length", 0),
        pad_token_id=0,
    )
    places = [(batch.token_ids_BT - 100).clamp(min=0) for batch in batches]
    for batch, place in zip(batches, places, strict=True):
        batch.old_logprobs_BT, batch.ref_logprobs_BT = old[place], ref[place]
        batch.sampled_logprobs_BT = batch.old_logprobs_BT
    algorithm.assign(batches, lambda tensor: tensor)
    losses = [
        algorithm.token_losses(batch, new[place], None)[0]
        for batch, place in zip(batches, places, strict=True)
    ]
    return sum(
        (loss * batch.weights_BT * batch.mask_BT).sum() for loss, batch in zip(losses, batches, strict=True)
    )


def advantages_of_trl(scale):
    rewards = torch.tensor(REWARDS, dtype=torch.float64).view(-1, GROUP)
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "none":
        return centred.flatten()
    deviation = rewards.std() if scale == "batch" else rewards.std(1, keepdim=True)
    return (centred / (deviation + 1e-4)).flatten()


def of_trl(new, old, ref, loss_type="dapo", epsilon=0.2, epsilon_high=None, delta=None, beta=0.0, scale_rewards="group",
           use_bias_correction_kl=True, importance_sampling_level="token", sapo_temperature_pos=1.0,
           sapo_temperature_neg=1.05, mask_truncated_completions=False):  # fmt: skip
    """GRPOTrainer._compute_loss, one completion after the other."""
    high = epsilon if epsilon_high is None else epsilon_high
    per_completion, start = [], 0
    for number, (length, advantage) in enumerate(zip(LENGTHS, advantages_of_trl(scale_rewards), strict=True)):
        here = slice(start, start + length)
        start += length
        log_ratio = new[here] - old[here]
        weight = (
            log_ratio.mean().expand(length) if importance_sampling_level == "sequence" else log_ratio
        ).exp()
        if loss_type == "cispo":
            loss = -weight.clamp(max=high).detach() * advantage * new[here]
        elif loss_type == "sapo":
            temperature = sapo_temperature_pos if advantage > 0 else sapo_temperature_neg
            loss = -torch.sigmoid(temperature * (weight - 1)) * 4 / temperature * advantage
        else:
            first = weight if delta is None else weight.clamp(max=delta)
            loss = -torch.min(first * advantage, weight.clamp(1 - epsilon, 1 + high) * advantage)
        if beta:
            apart = ref[here] - new[here]
            divergence = apart.exp() - apart - 1
            loss = loss + beta * divergence * (weight if use_bias_correction_kl else 1)
        kept = not (mask_truncated_completions and number in TRUNCATED)
        per_completion.append((loss * kept, length * kept))
    sums, tokens = [loss.sum() for loss, _ in per_completion], [count for _, count in per_completion]
    if loss_type in ("grpo", "sapo"):
        return sum(one / max(count, 1) for one, count in zip(sums, tokens, strict=True)) / len(sums)
    if loss_type == "dr_grpo":
        return sum(sums) / (len(sums) * 9)
    return sum(sums) / sum(tokens)


CASES = [
    {},
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo", "scale_rewards": False},
    {"scale_rewards": "none"},
    {"scale_rewards": "batch", "loss_type": "grpo"},
    {"epsilon": 0.1, "epsilon_high": 0.28},
    {"delta": 1.5, "epsilon_high": 0.3},
    {"beta": 0.5},
    {"beta": 0.5, "use_bias_correction_kl": False, "loss_type": "grpo"},
    {"loss_type": "cispo", "epsilon_high": 1.2},
    {"loss_type": "sapo", "sapo_temperature_neg": 1.5},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01},
    {"mask_truncated_completions": True},
]


@pytest.mark.parametrize(
    "arguments", CASES, ids=lambda case: " ".join(f"{key}={value}" for key, value in case.items())
)
def test_the_loss_and_its_gradient_are_those_of_trl(arguments, numbers):
    new, old, ref = numbers
    oracle = {**arguments}
    if isinstance(oracle.get("scale_rewards"), bool):
        oracle["scale_rewards"] = "group" if oracle["scale_rewards"] else "none"
    found, wanted = ours(arguments, new, old, ref), of_trl(new, old, ref, **oracle)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    (gradient,), (of_wanted,) = (torch.autograd.grad(loss, new) for loss in (found, wanted))
    assert of_wanted.abs().max() > 0
    torch.testing.assert_close(gradient, of_wanted, rtol=1e-4, atol=1e-6)
