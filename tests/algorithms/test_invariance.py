"""Neither layout nor micro-batches nor order nor ranks nor the environment's words change a loss or its gradient."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from invariance import (
    ARRANGEMENTS,
    BASE,
    Arrangement,
    groups,
    invariance_error,
    outcome,
    with_privileged,
)
from packed import micro_batches, tries
from recipes import RECIPES, SHARED, TURNS
from sweeps import sampled

from rl4llm.algorithms import ALGORITHMS, GRPO, PPO, ReinforcePP
from rl4llm.algorithms.returns import discounted_returns, gae
from rl4llm.backends.heads import ValueHead
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import Group, TokenSpan
from rl4llm.data.pack import Batching
from rl4llm.data.plan import is_computed
from rl4llm.trainers.prepare import Preparation


def is_accepted(name, options):
    try:
        ALGORITHMS[name](**options).check(group_size=8)
    except ConfigError:  # such as without the option that a method cannot do without
        return False
    return True


CASES = [
    (name, options)
    for name in ALGORITHMS
    for options in ({}, *(RECIPES[name].invariance if name in RECIPES else ()))
    if is_accepted(name, options)
]


def test_every_method_has_a_recipe():
    assert sorted(RECIPES) == sorted(ALGORITHMS)


WITH_SHARED_OPTIONS = ("grpo", "ppo", "gspo", "vapo")
"""The methods with which the options that all have in common are tried; a sweep tries them with every method."""


def is_distinct(case):
    name, options = case
    return options not in (*SHARED, TURNS) or name in WITH_SHARED_OPTIONS


@pytest.mark.parametrize(
    ("name", "options"),
    sampled(CASES, is_distinct),
    ids=lambda case: "+".join(case) if isinstance(case, dict) else case,
)
def test_arrangement_changes_neither_loss_nor_gradient(name, options):
    nonnegative = RECIPES[name].nonnegative
    found = outcome(lambda: ALGORITHMS[name](**options), BASE, nonnegative=nonnegative)
    assert found.gradient.abs().max() > 1e-3
    assert not ALGORITHMS[name]().needs().critic or found.value_gradient.abs().max() > 1e-3
    assert invariance_error(name, options, nonnegative) < 1e-6


@pytest.mark.parametrize("arrangement", ["packed", "small micro-batches", "two ranks, one without groups"])
def test_a_loss_that_divides_by_its_own_batch_would_be_found(arrangement):
    @dataclass(slots=True)
    class OwnMean(GRPO):
        def token_losses(self, batch, logprobs_BT, entropy_BT):
            loss_BT, metrics = GRPO.token_losses(self, batch, logprobs_BT, entropy_BT)
            return loss_BT / batch.mask_BT.numel(), metrics

    assert outcome(OwnMean, BASE).distance(outcome(OwnMean, ARRANGEMENTS[arrangement])) > 1e-2


@pytest.mark.parametrize("name", ["grpo", "ppo", "reinforce_pp"])
def test_several_updates_do_not_depend_on_micro_batches(name):
    expected = outcome(ALGORITHMS[name], BASE, updates=2)
    assert len(expected.losses) == (4 if name == "ppo" else 2)  # the critic takes as many as the policy
    for arrangement in (Arrangement("packed", 40), Arrangement("shared", 60), Arrangement("sorted", 1)):
        assert expected.distance(outcome(ALGORITHMS[name], arrangement, updates=2)) < 1e-6


def one_batch(found):
    members = [one for group in found for one in group.trajectories]
    credits = [list(one.turn_rewards) for one in members]
    (batch,) = micro_batches(members, "packed", 10**5, "token", credits)
    return batch


def with_more_context(found, count):
    def longer(one):
        first, *rest = one.spans
        spans = [
            TokenSpan.context(span.token_ids * count) if span.author == "context" else span for span in rest
        ]
        return replace(one, spans=(first, *spans))

    return [Group(group.prompt_id, tuple(map(longer, group.trajectories))) for group in found]


@pytest.mark.parametrize("count", [2, 30])
def test_estimates_ignore_the_environments_tokens(count):
    short, long = one_batch(groups()), one_batch(with_more_context(groups(), count))
    assert long.token_ids_BT.numel() > short.token_ids_BT.numel()

    def estimates(batch, garbage):
        rewards_BT = batch.credits_BT.double() * 0.1
        values_BT = (batch.token_ids_BT.double() * 0.01).sin().where(batch.mask_BT, garbage)
        return [
            gae(rewards_BT, values_BT, batch, 0.97, 0.9)[batch.mask_BT],
            discounted_returns(rewards_BT, batch, 0.9)[batch.mask_BT],
        ]

    for one, other in zip(estimates(short, 5.0), estimates(long, -70.0), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("algorithm", [PPO(gamma=0.9, kl_coef=0.1), ReinforcePP(gamma=0.9, kl_coef=0.1)])
def test_numbers_on_the_environments_tokens_change_no_advantage(algorithm):
    def advantages(garbage):
        batch = one_batch(groups())
        numbers_BT = (batch.token_ids_BT.double() * 0.37).sin()
        for name in ("old_logprobs_BT", "ref_logprobs_BT", "values_BT"):
            setattr(batch, name, (numbers_BT * len(name)).where(batch.mask_BT, garbage))
        algorithm.assign([batch], lambda tensor: tensor)
        return batch.advantages_BT[batch.mask_BT]

    torch.testing.assert_close(advantages(0.0), advantages(1e4), atol=0, rtol=0)


def adapted(name):
    """Return a method with an adaptive penalty of 0.2 in the reward, after a step far above and one far below the target."""
    algorithm = ALGORITHMS[name](kl_coef=0.2, kl_target=0.1, kl_horizon=1, kl_in="reward", whiten=False)
    algorithm.after_step({"kl": 9.0})
    algorithm.after_step({"kl": 9.0})
    algorithm.after_step({"kl": 0.0})
    return algorithm, 0.2 * 1.2 * 1.2 * 0.8


@pytest.mark.parametrize("name", ["grpo", "rloo", "dapo"])
def test_the_penalty_in_a_trajectorys_reward_adapts(name):
    algorithm, coefficient = adapted(name)
    assert algorithm.needs().reward_kl[0] == pytest.approx(coefficient)


@pytest.mark.parametrize("name", ["ppo", "vapo", "reinforce_pp"])
def test_the_penalty_in_a_tokens_reward_adapts(name):
    algorithm, coefficient = adapted(name)

    def advantages(algorithm):
        batch = one_batch(groups())
        for number, field in enumerate(("old_logprobs_BT", "ref_logprobs_BT", "values_BT")):
            setattr(batch, field, (batch.token_ids_BT.double() * (0.37 + number)).sin())
        algorithm.assign([batch], lambda tensor: tensor)
        return batch.advantages_BT[batch.mask_BT]

    fixed = ALGORITHMS[name](kl_coef=coefficient, kl_in="reward", whiten=False)
    torch.testing.assert_close(advantages(algorithm), advantages(fixed))
    assert not torch.allclose(advantages(algorithm), advantages(replace(fixed, kl_coef=0.2)), atol=1e-3)


SMALL_VOCABULARY = 300


def of_the_model(found):
    """Return the same groups with tokens that a small model knows."""

    def known(span):
        return replace(span, token_ids=tuple(token % SMALL_VOCABULARY for token in span.token_ids))

    def records(one):
        read = tuple(tuple(map(known, record)) for record in one.privileged)
        return replace(one, spans=tuple(map(known, one.spans)), privileged=read)

    return [
        replace(
            group,
            trajectories=tuple(map(records, group.trajectories)),
            baseline=group.baseline
            and replace(group.baseline, spans=tuple(map(known, group.baseline.spans))),
        )
        for group in found
    ]


class Counted(TorchBackend):
    passes = 0

    def forward(self, batch, *, temperature=1.0):
        self.passes += 1
        return super().forward(batch, temperature=temperature)


@pytest.mark.parametrize(("reuse", "updates"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("correction", ["tis", "geometric_icepop"])
def test_old_log_probs_of_a_first_update_need_no_pass(model, correction, reuse, updates):
    """The weights after all updates are those with a pass, in small micro-batches; the first of several needs none."""

    def trained(algorithm):
        policy = Counted(copy.deepcopy(model), lr=1e-3)
        batching = Batching(
            "packed", "token", 0, 64, 64, passes_per_rollout=reuse, updates_per_rollout=updates
        )
        preparation = Preparation(algorithm=algorithm, policy=policy, batching=batching)
        made, grads = preparation.prepare(of_the_model(groups()), step=0).updates, []
        for update in made:
            for batch in update.batches:
                policy.forward_backward(batch, algorithm.token_losses)
            grads += [parameter.grad.clone() for parameter in policy.model.parameters()]
            policy.optim_step()
        return grads, policy.passes, [len(update.batches) for update in made]

    @dataclass(slots=True)
    class Before(GRPO):
        def needs(self):
            return replace(GRPO.needs(self), old_in_losses=False)

    options = {"old_logprobs": "recomputed", "correction": correction, "correction_low": 0.0}
    (expected, most, sizes), (found, passes, _) = trained(Before(**options)), trained(GRPO(**options))
    assert max(tensor.abs().max() for tensor in expected) > 3e-4
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert most == sum(sizes[:updates]) and sizes[0] > 1
    assert passes == (0 if updates == 1 else sizes[1]) if reuse == 1 else most


@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo", "gmpo", "gigpo", "sdft"])
def test_arrangement_does_not_change_a_real_models_gradient(name, model):
    policy = TorchBackend(model, lr=0.0)
    critic = TorchBackend(model, value_head=ValueHead(model.config.hidden_size), lr=0.0)
    algorithm = ALGORITHMS[name]()

    def gradient(layout, budget):
        policy.model.zero_grad()
        batching = Batching(layout, algorithm.aggregation, 0, budget, 2048, constant_length=18)
        preparation = Preparation(
            algorithm=algorithm, policy=policy, critic=critic, reference=policy, batching=batching
        )
        found = of_the_model(map(with_privileged, groups()))
        for update in preparation.prepare(found, step=100).updates:
            for batch in update.batches if update.model == "model" else ():
                policy.forward_backward(batch, algorithm.token_losses)
        return {key: parameter.grad.clone() for key, parameter in policy.model.named_parameters()}

    expected = gradient("sorted", 4096)
    assert any(tensor.abs().max() > 1e-4 for tensor in expected.values())
    for layout, budget in (("packed", 4096), ("shared", 64), ("sorted", 32)):
        for key, tensor in gradient(layout, budget).items():
            torch.testing.assert_close(tensor, expected[key], atol=1e-6, rtol=1e-4, msg=f"{layout} {key}")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "grpo",
            {
                "kl_coef": 0.1,
                "entropy_coef": 0.2,
                "old_logprobs": "recomputed",
                "correction": "sequence_tis",
            },
        ),
        ("gspo", {}),
        ("gmpo", {}),
        ("ppo", {"kl_coef": 0.1, "kl_in": "reward"}),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_a_shared_token_trains_in_each_record_as_if_alone(name, options, model, monkeypatch):
    """Tries of records whose rewards and sampled log-probs differ, through the passes of all models and both updates."""
    monkeypatch.setattr("rl4llm.data.layouts.SHORTEST", 1)
    members = tries(seed=5)
    found = [Group(name, tuple(one for one in members if one.prompt_id == name)) for name in ("t0", "t1")]
    algorithm = ALGORITHMS[name](**options)

    def gradient(layout, budget):
        policy, reference = (TorchBackend(copy.deepcopy(model), lr=0.0) for _ in range(2))
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.05)
        critic = TorchBackend(copy.deepcopy(model), value_head=ValueHead(model.config.hidden_size), lr=0.0)
        torch.nn.init.constant_(critic._module.value_head.linear.weight, 0.1)
        preparation = Preparation(
            algorithm=algorithm, policy=policy, critic=critic, reference=reference, temperature=0.8,
            batching=Batching(layout, algorithm.aggregation, 0, budget, 2048, updates_per_rollout=2, constant_length=18),
        )  # fmt: skip
        grads, tokens, entropy = {}, 0, algorithm.needs().entropy
        for number, update in enumerate(preparation.prepare(found, step=100).updates):
            of_critic = update.model == "critic"
            trained, loss = (
                (critic, algorithm.value_losses) if of_critic else (policy, algorithm.token_losses)
            )
            for batch in update.batches:
                passes = {} if of_critic else {"temperature": 0.8, "entropy": entropy}
                trained.forward_backward(
                    batch,
                    (lambda batch, numbers_BT, _, loss=loss: loss(batch, numbers_BT)) if of_critic else loss,
                    **passes,
                )
                tokens += int(is_computed(batch).sum())
            grads |= {
                (number, key): parameter.grad.clone() for key, parameter in trained.model.named_parameters()
            }
        return grads, tokens

    expected, flat = gradient("sorted", 1)
    assert max(tensor.abs().max() for tensor in expected.values()) > 1e-3
    for budget in (1000, 60):
        grads, tokens = gradient("shared", budget)
        assert tokens < 0.8 * flat
        for key, tensor in grads.items():
            torch.testing.assert_close(tensor, expected[key], atol=1e-6, rtol=1e-4, msg=f"{budget} {key}")
