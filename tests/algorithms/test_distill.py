"""Distillation with whole distributions: exact sums, a tail that keeps the minimum, and gradients of a real model."""

import copy
from dataclasses import replace

import pytest
import torch
from invariance import groups
from packed import tries
from test_invariance import of_the_model
from transformers import GraniteConfig, GraniteForCausalLM

from rl4llm.algorithms import Distill
from rl4llm.algorithms.distill import compared
from rl4llm.algorithms.divergence import divergence, with_tail
from rl4llm.backends import distributions
from rl4llm.backends.runner import ModelRunner
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.allowed import bits
from rl4llm.core.errors import ConfigError, EngineError
from rl4llm.core.types import Group, TokenSpan, Trajectory
from rl4llm.data.grammars import masks
from rl4llm.data.pack import Batching
from rl4llm.trainers.passes import head_of
from rl4llm.trainers.prepare import Preparation

KINDS = ("forward", "reverse", "jensen_shannon")


def logits(seed, rows=7, vocabulary=20):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)


def test_the_whole_vocabulary_gives_torchs_divergence():
    student, teacher = logits(0).log_softmax(1), logits(1).log_softmax(1)

    def kl(p, q):
        return torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(1)

    mixture = (0.7 * student.exp() + 0.3 * teacher.exp()).log()
    expected = {
        "forward": kl(teacher, student),
        "reverse": kl(student, teacher),
        "jensen_shannon": 0.7 * kl(student, mixture) + 0.3 * kl(teacher, mixture),
    }
    for kind in KINDS:
        actual = compared(kind, 0.3, 0, student, teacher)
        torch.testing.assert_close(actual, expected[kind], atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_more_of_the_top_tokens_approach_the_divergence(kind):
    """With the rest as one more outcome, each k gives a lower bound of the next."""
    student, teacher = logits(0).log_softmax(1), logits(1).log_softmax(1)
    whole, last = divergence(student, teacher, kind), torch.zeros(7, dtype=torch.float64)
    for top in range(1, 20):
        best, ids = teacher.topk(top, 1)
        bound = compared(kind, 0.5, top, student.gather(1, ids), best)
        assert (bound >= last - 1e-12).all() and (bound <= whole + 1e-12).all()
        last = bound
    torch.testing.assert_close(last, whole, atol=1e-12, rtol=0)  # one token is left, alone in the tail


@pytest.mark.parametrize("kind", KINDS)
def test_the_minimum_is_the_teacher_where_it_is_compared(kind):
    student, teacher = logits(0).requires_grad_(), logits(1).log_softmax(1)
    best, ids = teacher.topk(5, 1)
    optimizer = torch.optim.LBFGS(
        [student], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def loss():
        optimizer.zero_grad()
        value = compared(kind, 0.5, 5, student.log_softmax(1).gather(1, ids), best).sum()
        value.backward()
        return value

    optimizer.step(loss)
    found = student.log_softmax(1).gather(1, ids)
    torch.testing.assert_close(found.exp(), best.exp(), atol=1e-5, rtol=1e-3)
    assert loss().item() < 1e-8


def test_a_tail_of_nothing_stays_finite():
    sure = torch.tensor([[0.0, -60.0], [1e-7, -60.0]]).requires_grad_()
    value = divergence(with_tail(sure), with_tail(torch.tensor([[-0.5, -3.0], [0.0, -60.0]])), "forward")
    assert value.isfinite().all() and torch.autograd.grad(value.sum(), sure)[0].isfinite().all()


def models(model):
    """Return a student and a teacher that differ."""
    student, teacher = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for number, parameter in enumerate(teacher.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return student, teacher


def gradient(
    algorithm, student, teacher, found, layout="sorted", budget=4096, tokenizer=None, kind=TorchBackend
):
    """Return loss and gradient of a step on these groups, through the passes that a trainer makes."""
    policy, reference = TorchBackend(student, lr=0.0), kind(teacher, trains=False)
    student.zero_grad()
    batching = Batching(layout, algorithm.aggregation, 0, budget, 2048, tokenizer=tokenizer)
    preparation = Preparation(
        algorithm=algorithm, policy=policy, reference=reference, batching=batching, temperature=0.8
    )
    loss, needed = 0.0, algorithm.needs().divergence
    head = head_of(needed, reference) if needed else None
    for update in preparation.prepare(found, step=0).updates:
        for batch in update.batches:
            loss += policy.forward_backward(batch, algorithm.token_losses, temperature=0.8, head=head)["loss"]
    return loss, {name: parameter.grad.clone() for name, parameter in student.named_parameters()}


def plain(algorithm, student, teacher, found, tokenizer=None, places=slice(None)):
    """Return the same from whole logits, one trajectory at a time; with a tokenizer, of what grammars allow.

    `places` are those of the top tokens that are compared.
    """
    student.zero_grad()
    total, count = 0.0, sum(one.num_policy_tokens for group in found for one in group.trajectories)
    for trajectory in (one for group in found for one in group.trajectories):
        ids = torch.tensor([trajectory.token_ids])
        sampled = torch.tensor([span.author == "policy" for span in trajectory.spans for _ in span.token_ids])
        policy_TV = student(ids).logits[0, :-1][sampled[1:]] / 0.8
        with torch.no_grad():
            teacher_TV = teacher(ids).logits[0, :-1][sampled[1:]] / 0.8
        if tokenizer:
            blocked_TV = torch.zeros_like(policy_TV, dtype=torch.bool)
            (one,) = trajectory.policy_spans
            if one.grammar:
                words_TW = torch.from_numpy(masks(tokenizer, one.grammar, one.token_ids))
                blocked_TV = ~bits(words_TW, slice(0, policy_TV.shape[1]))
            policy_TV, teacher_TV = (x.masked_fill(blocked_TV, -1e30) for x in (policy_TV, teacher_TV))
        policy_TV, teacher_TV = policy_TV.log_softmax(-1), teacher_TV.log_softmax(-1)
        if algorithm.top_k:
            teacher_TV, top = teacher_TV.topk(algorithm.top_k, -1)
            policy_TV, teacher_TV = policy_TV.gather(1, top)[:, places], teacher_TV[:, places]
        values = compared(algorithm.divergence, algorithm.alpha, algorithm.top_k, policy_TV, teacher_TV)
        total = total + values.sum() / count
    total.backward()
    return total.item(), {name: parameter.grad.clone() for name, parameter in student.named_parameters()}


def assert_same(actual, expected):
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    assert max(tensor.abs().max() for tensor in expected[1].values()) > 5e-4
    for name, tensor in expected[1].items():
        torch.testing.assert_close(actual[1][name], tensor, atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_give_the_gradient_of_whole_logits(kind, top_k, model, monkeypatch):
    monkeypatch.setattr(distributions, "TILE_BYTES", 4 * 3 * model.config.vocab_size)  # three rows at a time
    scores, heights = distributions._scores, []
    monkeypatch.setattr(distributions, "_scores", lambda x, *how: heights.append(len(x)) or scores(x, *how))
    algorithm, found = (
        Distill(teacher_path="t", divergence=kind, top_k=top_k, alpha=0.3),
        of_the_model(groups()),
    )
    expected = plain(algorithm, *models(model), found)
    for layout, budget in (("sorted", 4096), ("packed", 64), ("shared", 64), ("sorted", 1)):
        assert_same(gradient(algorithm, *models(model), found, layout, budget), expected)
    assert max(heights) == 3


@pytest.mark.parametrize("top_k", [0, 4, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_distributions_are_of_what_a_grammar_allows(kind, top_k, model, tokenizer):
    model = copy.deepcopy(model)
    model.resize_token_embeddings(model.config.vocab_size + 96, mean_resizing=False)
    end = tokenizer.eos_token_id
    grammars = [f"start: /[ab]{{0,3}}/ <[{end}]>", f"start: /[abc0-9]+/ <[{end}]>", ""]
    turn, prompt = (*tokenizer.encode("ab"), end), TokenSpan.context(tokenizer.encode("How many coins?"))
    spans = [TokenSpan(turn, "policy", (0.0,) * len(turn), 0, (), grammar) for grammar in grammars]
    members = tuple(Trajectory("p", (prompt, span), (), {}, 1.0, "stop") for span in spans)
    algorithm = Distill(teacher_path="t", divergence=kind, top_k=top_k, alpha=0.3)
    expected = plain(algorithm, *models(model), [Group("p", members)], tokenizer)
    for layout in ("sorted", "shared"):
        actual = gradient(algorithm, *models(model), [Group("p", members)], layout, 4096, tokenizer)
        assert_same(actual, expected)


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_token_that_records_share_is_compared_in_each(top_k, model, monkeypatch):
    monkeypatch.setattr("rl4llm.data.layouts.SHORTEST", 1)
    members = tries(seed=5)
    found = [Group(name, tuple(one for one in members if one.prompt_id == name)) for name in ("t0", "t1")]
    algorithm = Distill(teacher_path="t", divergence="forward", top_k=top_k)
    expected = gradient(algorithm, *models(model), found, "sorted", 1)
    assert_same(gradient(algorithm, *models(model), found, "shared", 1000), expected)


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_student_like_its_teacher_learns_nothing(kind, top_k, model):
    """Another policy sampled, whose log-probs take no part."""
    algorithm = Distill(teacher_path="t", divergence=kind, top_k=top_k)
    loss, grads = gradient(algorithm, model, copy.deepcopy(model), of_the_model(groups()))
    assert abs(loss) < 1e-6 and max(tensor.abs().max() for tensor in grads.values()) < 1e-6


def test_rewards_train_beside_a_divergence(model):
    """The gradients of both parts add up."""
    found, options = of_the_model(groups()), {"teacher_path": "t", "top_k": 4, "old_logprobs": "recomputed"}

    def grads(**more):
        return gradient(Distill(**options, **more), *models(model), found)[1]

    both = grads(divergence="forward", reward_coef=0.5)
    neither, sampled = grads(divergence="forward"), grads(divergence="sampled")
    with_reward = grads(divergence="sampled", reward_coef=0.5)
    for name, tensor in both.items():
        torch.testing.assert_close(
            tensor, neither[name] + with_reward[name] - sampled[name], atol=2e-6, rtol=1e-4
        )


def test_a_pass_without_policy_tokens_fills_nothing_real(model):
    backend = TorchBackend(copy.deepcopy(model), trains=False)
    batch = replace(Batching().pack(of_the_model(groups())[0].trajectories, [1.0] * 4)[0])
    batch.mask_BT = torch.zeros_like(batch.mask_BT)
    for top in (0, 3):
        assert not any(tensor.any() for tensor in backend.refer(batch, top).values())


class Padded(TorchBackend):
    """A teacher whose second most probable token, by its number, is padding that the student lacks."""

    def refer(self, batch, top, *, temperature=1.0):
        numbers = super().refer(batch, top, temperature=temperature)
        numbers["ref_top_ids_BTK"][..., 1] = 10**6
        return numbers


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_the_student_lacks_is_one_of_the_rest(kind, splits, model, monkeypatch):
    """A server has no smaller output layer to give."""
    monkeypatch.setattr(ModelRunner, "_output_layer_is_all", lambda self: splits)
    (student, teacher), found = models(model), of_the_model(groups())
    algorithm = Distill(teacher_path="t", divergence=kind, top_k=4)
    expected = plain(algorithm, student, teacher, found, places=[0, 2, 3])
    assert_same(gradient(algorithm, student, teacher, found, kind=Padded), expected)


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_teacher_that_computes_its_own_logits_is_compared(top_k, model):
    """As Granite does, which divides them."""
    config = GraniteConfig(
        vocab_size=model.config.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, logits_scaling=4.0,
    )  # fmt: skip
    (student, _), teacher, found = models(model), GraniteForCausalLM(config).eval(), of_the_model(groups())
    assert not TorchBackend(teacher, trains=False).runner.splits
    algorithm = Distill(teacher_path="t", divergence="forward", top_k=top_k)
    expected = plain(algorithm, student, teacher, found)
    assert_same(gradient(algorithm, student, teacher, found), expected)


@pytest.mark.parametrize("more", [-8, 8])
def test_padding_of_one_vocabulary_is_not_compared(more, model):
    """Of a teacher whose output layer is narrower or wider, the tokens that both have count."""
    student, teacher = models(model)
    size, found = student.config.vocab_size, of_the_model(groups())
    teacher.resize_token_embeddings(size + more, mean_resizing=False)
    algorithm = Distill(teacher_path="t", divergence="reverse")
    loss, _ = gradient(algorithm, student, teacher, found)
    for each in (student, teacher):
        each.resize_token_embeddings(min(size, size + more))
    assert loss == pytest.approx(plain(algorithm, student, teacher, found)[0], rel=1e-5)


class Deaf(TorchBackend):
    """A teacher that does not score tokens whose id is a multiple of `of`."""

    of = 3

    def refer(self, batch, top, *, temperature=1.0):
        numbers = super().refer(batch, top, temperature=temperature)
        numbers["ref_logprobs_BT"][batch.token_ids_BT % self.of == 0] = float("nan")
        return numbers


def test_tokens_without_a_score_do_not_train(model):
    """They stay in the divisor, and are counted; a step without any score stops."""
    student, teacher = models(model)
    options = {"divergence": "forward", "top_k": 4}
    preparation = Preparation(
        algorithm=Distill(teacher_url="http://t", **options), policy=TorchBackend(student, lr=0.0),
        reference=Deaf(teacher, trains=False), batching=Batching("packed", "token", 0, 64, 2048),
    )  # fmt: skip
    prepared = preparation.prepare(found := of_the_model(groups()), step=0)
    whole = replace(preparation, algorithm=Distill(teacher_path="t", **options)).prepare(found, step=0)
    seen = total = 0
    for batch, plain_batch in zip(prepared.updates[0].batches, whole.updates[0].batches, strict=True):
        scored_BT = plain_batch.mask_BT & (batch.token_ids_BT % 3 != 0)
        assert torch.equal(batch.mask_BT, scored_BT) and not batch.ref_logprobs_BT.isnan().any()
        assert torch.equal(batch.weights_BT, plain_batch.weights_BT * scored_BT)
        seen, total = seen + int(scored_BT.sum()), total + int(plain_batch.mask_BT.sum())
    assert prepared.metrics == {"reference/unscored": pytest.approx(1 - seen / total)} and 0 < seen < total
    preparation.reference.of = 1
    with pytest.raises(EngineError):
        preparation.prepare(found, step=0)


def test_a_distillation_has_one_teacher():
    for options in (
        {},
        {"teacher_path": "t", "teacher_url": "http://t"},
        {"teacher_url": "http://t", "divergence": "forward"},
    ):
        with pytest.raises(ConfigError):
            Distill(**options).check(group_size=1)


@pytest.mark.parametrize("options", [{"top_k": 32}, {"alpha": 0.1}])
def test_an_option_of_another_divergence_is_refused(options):
    with pytest.raises(ConfigError):
        Distill(teacher_path="t", **options).check(group_size=1)
    Distill(teacher_path="t", **options | {"divergence": "jensen_shannon"}).check(group_size=1)
