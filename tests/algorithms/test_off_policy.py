"""What samples of older weights teach, against exact sums over all actions of a policy with one token."""

from dataclasses import dataclass

import pytest
import torch

from rl4llm.algorithms import ALGORITHMS, GRPO, SDFT, Distill
from rl4llm.compose import build_algorithm
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import check_options
from rl4llm.core.types import TrainBatch

POLICY, BEFORE, SAMPLER, OTHER = (
    torch.tensor(logits, dtype=torch.float64).log_softmax(0)
    for logits in ([1.0, 0.0, -1.0], [0.8, 0.1, -0.9], [-1.0, 1.0, 0.5], [0.2, 0.1, 0.0])
)
SAMPLED = {"old_logprobs": "sampled"}
RECOMPUTED = [
    {"old_logprobs": "recomputed", "correction": name} for name in ("is", "tis", "token_mask", "sequence_tis")
]
WIDE = {"clip_low": 0.99, "clip_high": 99.0}


def gradient(algorithm, policy, sampler, actions, weights, before=None, ref=None, credits=None):
    """Return loss and gradient of the policy's logits; each action is a trajectory of one token.

    `before` is the policy before the updates of the rollout, by default the same policy.
    """
    logits = policy.clone().requires_grad_()
    logprobs_BT = logits.log_softmax(0)[actions][None]
    segments_BT = torch.arange(1, len(actions) + 1)[None]
    zeros_BT = torch.zeros(1, len(actions), dtype=torch.float64)
    batch = TrainBatch(
        actions[None], segments_BT * 0, segments_BT, segments_BT > 0, sampler[actions][None], zeros_BT, weights[None]
    )  # fmt: skip
    if credits is not None:
        batch.credits_BT = credits[None]
    if algorithm.old_logprobs == "sampled":
        batch.old_logprobs_BT = batch.sampled_logprobs_BT
    elif before is not None:
        batch.old_logprobs_BT = before[actions][None]
    if ref is not None:
        batch.ref_logprobs_BT = ref[actions][None]
    algorithm.assign([batch], lambda tensor: tensor)
    loss = (algorithm.token_losses(batch, logprobs_BT, None)[0] * batch.weights_BT).sum()
    return loss.item(), torch.autograd.grad(loss, logits)[0]


def divergence(policy, other):
    """Return KL(policy || other) and its gradient by the policy's logits."""
    logits = policy.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    value = (logprobs.exp() * (logprobs - other)).sum()
    return value.item(), torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("before", [None, BEFORE], ids=["first", "later"])
@pytest.mark.parametrize("estimator", ["k1", "k3", "k3+"])
@pytest.mark.parametrize("options", [SAMPLED, *RECOMPUTED], ids=lambda one: one.get("correction", "sampled"))
def test_a_weighted_penalty_is_unbiased(options, estimator, before):
    algorithm = GRPO(kl_coef=1.0, kl_weighted=True, kl_estimator=estimator, **options)
    found = gradient(algorithm, POLICY, SAMPLER, torch.arange(3), SAMPLER.exp(), before, OTHER)
    torch.testing.assert_close(found, divergence(POLICY, OTHER))


@pytest.mark.parametrize("before", [None, BEFORE], ids=["first", "later"])
@pytest.mark.parametrize("teacher", [POLICY, OTHER], ids=["equal", "other"])
@pytest.mark.parametrize("options", [SAMPLED, RECOMPUTED[0]], ids=["sampled", "recomputed"])
@pytest.mark.parametrize("method", [Distill, SDFT])
def test_distillation_follows_the_divergence_from_the_teacher(method, options, teacher, before):
    """A student like its teacher has nothing to learn, however old its samples are."""
    own = {"teacher_path": "t", **WIDE} if method is Distill else {"ratio_max": 100.0}
    algorithm = method(**own, **options)
    _, found = gradient(algorithm, POLICY, SAMPLER, torch.arange(3), SAMPLER.exp(), before, teacher)
    torch.testing.assert_close(found, divergence(POLICY, teacher)[1], atol=1e-12, rtol=0)


def composed(name, **options):
    keys = {"model.path": "m", "rollout.max_staleness": 8, "algorithm": {"name": name, **options}}
    return build_algorithm(load_config(overrides=keys))


@pytest.mark.parametrize(("right", "policy"), [(0, (0.45, 0.55)), (1, (0.55, 0.45))])
@pytest.mark.parametrize(
    "name",
    ["cispo", "dapo", "dppo", "dppo_kl", "dr_grpo", "gmpo", "grpo", "gspo", "gspo_token", "rloo", "sapo"],
)
def test_old_samples_move_the_right_answer_up(name, right, policy):
    """Two answers, a sampler at 0.3 and 0.7 and a policy beyond the clip since: the step still has a direction."""
    sampler, policy = (torch.tensor(shares, dtype=torch.float64).log() for shares in ((0.3, 0.7), policy))
    actions = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])
    credits = (actions == right).double()
    credits = (credits - credits.mean()) / credits.std()
    weights = torch.full((8,), 1 / 8, dtype=torch.float64)
    _, found = gradient(composed(name), policy, sampler, actions, weights, credits=credits)
    assert found[right] < -0.2
    if name == "grpo" and right == 0:  # what the user chose holds, though it has no gradient
        _, found = gradient(composed(name, **SAMPLED), policy, sampler, actions, weights, credits=credits)
        assert found.abs().max() < 1e-12


@dataclass(slots=True)
class OwnLosses(GRPO):
    """Losses of a user, who knows nothing of weights."""

    supers: bool = False

    def token_losses(self, batch, logprobs_BT, entropy_BT):
        if self.supers:
            return GRPO.token_losses(self, batch, logprobs_BT, entropy_BT)
        ratio_BT = (logprobs_BT - batch.old_logprobs_BT).exp()
        return -ratio_BT * batch.advantages_BT, {}


@pytest.mark.parametrize("supers", [False, True])
def test_own_losses_are_weighed_once(supers):
    options = {"old_logprobs": "recomputed", "correction": "is"}
    given = (
        POLICY,
        SAMPLER,
        torch.arange(3),
        SAMPLER.exp(),
        POLICY,
        None,
        torch.tensor([1.0, 0.5, -0.5]).double(),
    )
    expected = gradient(GRPO(**options), *given)[1]
    torch.testing.assert_close(gradient(OwnLosses(supers=supers, **options), *given)[1], expected)


def test_the_correction_of_a_class_is_kept_for_older_samples():
    @dataclass(slots=True)
    class Own(GRPO):
        correction: str | None = "icepop"

    assert Own.stale_options({}) == {"old_logprobs": "recomputed"}
    assert GRPO.stale_options({"correction": "icepop"}) == {"old_logprobs": "recomputed"}
    assert GRPO.stale_options({"correction": None}) == {}


@pytest.mark.parametrize("name", ["dppo", "dppo_kl"])
@pytest.mark.parametrize("option", ["correction", "correction_low", "correction_high", "old_logprobs"])
def test_a_ratio_to_the_sampler_has_no_option_of_a_correction(name, option):
    options = {option: getattr(GRPO(), option)}
    check_options("algorithm", GRPO, options)
    with pytest.raises(ConfigError):
        check_options("algorithm", ALGORITHMS[name], options)
