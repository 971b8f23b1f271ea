"""Clients of the Tinker protocol train and sample models of this machine."""

import asyncio
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import Future, wait
from functools import partial
from http.client import HTTPConnection

import pytest
import torch
from tinker_client import (
    KEY,
    NAME,
    Client,
    Refused,
    put_into_cache,
    read_losses,
    served_apart,
    served_here,
    sparse,
)

from rl4llm.algorithms.cispo import CISPO
from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.gspo import GSPOToken
from rl4llm.algorithms.sft import SFT
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.cli import main
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.types import TrainBatch
from rl4llm.inference.local import MAX_ROWS
from rl4llm.runs import manifest
from rl4llm_tinker import server as http
from rl4llm_tinker import service
from rl4llm_tinker.messages import COMPILED, message, read_forward_backward, tensor_of
from rl4llm_tinker.models import Shape
from rl4llm_tinker.sampling import params_of
from rl4llm_tinker.store import run_of
from rl4llm_tinker.turns import JobWorker, Order

PROMPT, ANSWER = 5, 7  # tokens
NEVER = 1e9  # a clip that never cuts
LEARNS = {"learning_rate": 0.01}
SCORED = {"params": {"max_tokens": 1}, "prompt_logprobs": True}  # what compute_logprobs asks for


@pytest.fixture(scope="module")
def server(model_dir, tmp_path_factory):
    with served_here(model_dir, tmp_path_factory.mktemp("tinker")) as found:
        yield found


@pytest.fixture
def client(server):
    return Client(server[0])


def sequences(count=3):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 300, (PROMPT + ANSWER + one,), generator=generator) for one in range(count)]


def demonstrations():
    """Return data for cross_entropy: each token but those of the prompt, with a weight that is not 1."""
    return [
        (ids[:-1].tolist(), {"target_tokens": ids[1:], "weights": answer_only(ids, 0.7)})
        for ids in sequences()
    ]


def answer_only(ids, values):
    row = torch.full((len(ids) - 1,), values) if isinstance(values, float) else values.clone()
    row[: PROMPT - 1] = 0.0
    return row


def rollouts(targets=lambda ids: ids[1:], masked=False):
    """Return data of a policy loss; ratios lie on both sides of 1, and advantages have both signs."""
    generator = torch.Generator().manual_seed(6)
    found = []
    for ids in sequences():
        sampled = answer_only(ids, -5.8 + 0.6 * torch.randn(len(ids) - 1, generator=generator))
        advantages = answer_only(ids, torch.randn(len(ids) - 1, generator=generator))
        inputs = {"target_tokens": targets(ids), "logprobs": sampled, "advantages": advantages}
        if masked:
            inputs["sequence_ratio_mask"] = answer_only(ids, 1.0)
        found.append((ids[:-1].tolist(), inputs))
    return found


def as_batch(data, every=False):
    """Return what `rl4llm train` would make of the data: one row, tokens with their own numbers.

    With `every`, all tokens count that come after another, and not only those of the answers.
    """
    rows = [torch.tensor([*tokens, int(inputs["target_tokens"][-1])]) for tokens, inputs in data]

    def row(name, default=0.0):
        values = [inputs.get(name, torch.full((len(tokens),), default)) for tokens, inputs in data]
        return torch.cat([torch.cat([torch.zeros(1), one]) for one in values])[None]

    segments = torch.cat([torch.full((len(ids),), number) for number, ids in enumerate(rows, 1)])[None]
    positions = torch.cat([torch.arange(len(ids)) for ids in rows])[None]
    mask = positions >= (1 if every else PROMPT)
    batch = TrainBatch(
        token_ids_BT=torch.cat(rows)[None], position_ids_BT=positions, segment_ids_BT=segments,
        mask_BT=mask, sampled_logprobs_BT=row("logprobs"), credits_BT=row("advantages"),
        weights_BT=row("weights", 1.0) * mask,
    )  # fmt: skip
    batch.old_logprobs_BT, batch.advantages_BT = row("logprobs"), row("advantages")
    return batch


def own_backend(service, seed):
    """Return a backend with the adapter that a client gets for this seed, moved off its start."""
    adapter = service.bases[NAME].adapted(Shape(NAME, rank=4, seed=seed))
    stir(adapter.model)
    return TorchBackend(adapter.model, adapter=adapter)


def stir(model):
    """B begins as 0, which hides half of the gradient."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def dro(batch, logprobs_BT, entropy_BT):
    squared_BT = (logprobs_BT - batch.old_logprobs_BT).square()
    return -batch.advantages_BT * logprobs_BT + 0.3 / 2 * squared_BT, {}


@pytest.mark.parametrize(("name", "options", "ours"), [
    ("cross_entropy", {}, SFT().token_losses),
    ("importance_sampling", {}, GRPO(clip_low=1.0, clip_high=NEVER).token_losses),
    ("ppo", {}, GRPO(clip_low=0.2, clip_high=0.2).token_losses),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3}, GRPO(clip_low=0.5, clip_high=2.0).token_losses),
    ("cispo", {"clip_high_threshold": 1.1}, CISPO(clip_high=0.1).token_losses),
    ("gspo", {}, GSPOToken(clip_low=0.2, clip_high=0.2).token_losses),
    ("dro", {"beta": 0.3}, dro),
])  # fmt: skip
def test_losses_and_gradients_are_the_algorithms(server, client, name, options, ours):
    data = demonstrations() if name == "cross_entropy" else rollouts(masked=name == "gspo")
    model_id = client.model(seed=3)
    served = server[1]._models[model_id].backend
    stir(served.model)
    own = own_backend(server[1], seed=3)
    expected = own.forward_backward(as_batch(data, every=name == "dro"), ours)
    logprobs, metrics = client.losses(model_id, 1, data, name, **options)
    assert metrics["loss:sum"] == pytest.approx(expected["loss"], rel=1e-6)
    assert [len(row) for row in logprobs] == [len(tokens) for tokens, _ in data]
    pairs = zip(served.model.named_parameters(), own.model.named_parameters(), strict=True)
    trained = [(a.grad, b.grad) for (_, a), (_, b) in pairs if a.requires_grad]
    scale = max(float(theirs.abs().max()) for _, theirs in trained)
    assert scale > 0 and all(torch.allclose(a, b, rtol=0, atol=1e-6 * scale) for a, b in trained)


def test_targets_need_not_be_what_the_model_reads_next(client):
    """The cookbook's targets of a prompt are 0; and several targets stand at one place in a distillation."""
    model = client.model()
    (plain,), _ = client.losses(model, 1, rollouts()[:1], "importance_sampling", forward_only=True)
    zeroed = rollouts(
        targets=lambda ids: torch.cat([torch.zeros(PROMPT - 1, dtype=torch.long), ids[PROMPT:]])
    )
    (other,), _ = client.losses(model, 2, zeroed[:1], "importance_sampling", forward_only=True)
    assert torch.allclose(other[PROMPT - 1 :], plain[PROMPT - 1 :], atol=1e-6)
    assert not torch.allclose(other[: PROMPT - 1], plain[: PROMPT - 1])

    ids = sequences()[0]
    targets = torch.stack([ids[1:], ids[1:].flip(0)], 1)
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) - 0.5
    for seq, encoded in ((3, lambda tensor: tensor), (4, sparse)):
        inputs = {"target_tokens": encoded(targets), "weights": encoded(weights)}
        (found,), metrics = client.losses(model, seq, [(ids[:-1].tolist(), inputs)])
        assert torch.allclose(found[:, 0], plain, atol=1e-6)
        assert metrics["loss:sum"] == pytest.approx(-(found * weights).sum().item(), rel=1e-5)


def test_a_custom_loss_is_forward_and_weights(server, client):
    """The SDK computes d loss / d log-prob itself, and sends it as weights of cross_entropy with the opposite sign."""
    model_id, data = client.model(seed=4), demonstrations()
    logprobs, _ = client.losses(model_id, 1, data, forward_only=True)
    parameters = [one for one in server[1]._models[model_id].backend.model.parameters() if one.requires_grad]
    assert all(one.grad is None for one in parameters)
    weights = [-2 * row for row in logprobs]  # of the sum of squares
    client.losses(
        model_id, 2, [(ids, {**one, "weights": w}) for (ids, one), w in zip(data, weights, strict=True)]
    )
    found = [one.grad.clone() for one in parameters]
    own = own_backend(server[1], seed=4)
    for name, parameter in own.model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    batch = as_batch(data, every=True)
    batch.weights_BT = batch.mask_BT.float()
    own.forward_backward(batch, lambda batch, logprobs_BT, _: (logprobs_BT.square(), {}))
    for mine, theirs in zip(found, (one for one in own.model.parameters() if one.requires_grad), strict=True):
        assert torch.allclose(mine, theirs.grad, rtol=1e-4, atol=1e-5)


def test_requests_run_in_the_order_of_their_number(client):
    model, data = client.model(), demonstrations()
    later = client.call("optim_step", model_id=model, seq_id=2, adam_params=LEARNS)
    first = client.ask_losses(model, 1, data)
    again = client.ask_losses(model, 1, data)
    assert again == first
    assert client.wait(later)["metrics"]["grad_norm:mean"] > 0
    before = read_losses(client.wait(first))
    assert client.wait(again) == client.wait(first)
    _, after = client.losses(model, 3, data, forward_only=True)
    assert after["loss:sum"] < before[1]["loss:sum"]


def test_a_lost_request_fails_those_that_wait_for_it(server, client, monkeypatch):
    model, data = client.model(), demonstrations()
    waiting = [client.call("optim_step", model_id=model, seq_id=seq, adam_params=LEARNS) for seq in (2, 4)]
    server[1].tidy()
    assert not any(server[1]._promises[one["request_id"]].outcome.done() for one in waiting)
    monkeypatch.setattr(service, "GAP_S", 0.0)
    server[1].tidy()
    for one in waiting:
        with pytest.raises(Refused, match=f"request 1 of {model} has not arrived within 0 s"):
            client.wait(one)
    assert client.losses(model, 5, data)[1]["loss:sum"] > 0
    with pytest.raises(Refused, match="it came too late"):
        client.losses(model, 1, data)


def turns_of(*owners):
    """Return the order in which a worker takes jobs and samples that are queued behind a first one, by owner."""
    worker, gates, taken = JobWorker(), [threading.Event(), threading.Event()], ([], [])
    begun = threading.Event()
    orders = {name: Order(worker, name) for name in dict.fromkeys(owners)}
    outcomes = []

    def job(name):
        taken[0].append(name.partition(":")[0])
        return b""

    async def draw(name):
        taken[1].append(name.partition(":")[0])
        return b""

    async def first():
        await asyncio.to_thread(gates[1].wait)
        return b""

    def queue(put, *given):
        outcomes.append(Future())
        put(*given, outcomes[-1])

    try:
        queue(worker.sample, owners[0].partition(":")[0], MAX_ROWS, first)
        seqs = Counter()
        for name in owners:
            queue(worker.sample, name.partition(":")[0], MAX_ROWS, partial(draw, name))
        queue(worker.put, "gate", lambda: begun.set() or bytes(gates[0].wait()))
        begun.wait(60)  # so that no turn begins while only some of them are queued
        for name in owners:
            seqs[name] += 1
            queue(orders[name].add, seqs[name], partial(job, name))
        for gate in gates:
            gate.set()
        assert not wait(outcomes, timeout=60).not_done
    finally:
        worker.close()
    return ["".join(one) for one in taken]


def test_clients_take_turns_however_much_they_queue():
    assert turns_of("a:0", "a:0", "a:1", "a:1", "b:0", "b:0") == ["ababaa", "ababaa"]


def test_a_repeated_request_adds_its_gradient_once(client):
    data = demonstrations()
    norms = []
    for number, repeats in enumerate((1, 3)):
        model = client.model(number, seed=1)
        promised = [client.ask_losses(model, 1, data) for _ in range(repeats)]
        client.wait(promised[-1])
        norms.append(
            client.do("optim_step", model_id=model, seq_id=2, adam_params=LEARNS)["metrics"]["grad_norm:mean"]
        )
    assert norms[0] == norms[1]


def test_passes_change_neither_gradient_nor_loss(client, monkeypatch):
    norms, sums = [], []
    for number, tokens in enumerate((4096, 8)):
        monkeypatch.setattr("rl4llm_tinker.models.TOKENS_AT_ONCE", tokens)
        model = client.model(number, seed=1)
        sums.append(client.losses(model, 1, rollouts(), "ppo")[1]["loss:sum"])
        norms.append(
            client.do("optim_step", model_id=model, seq_id=2, adam_params={})["metrics"]["grad_norm:mean"]
        )
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and sums[0] == pytest.approx(sums[1], rel=1e-5)


EVERY = {
    "learning_rate": 0.02,
    "beta1": 0.5,
    "beta2": 0.7,
    "eps": 1e-3,
    "weight_decay": 0.3,
    "grad_clip_norm": 0.5,
}
DEFAULTS = dict(zip(EVERY, (1e-4, 0.9, 0.95, 1e-12, 0.0, math.inf), strict=True))  # the SDK's


def test_steps_are_those_of_adamw_with_every_parameter(server, client):
    model = client.model(seed=2)
    weights = [one for one in server[1]._models[model].backend.model.parameters() if one.requires_grad]
    states = [(one.detach().clone(), torch.zeros_like(one), torch.zeros_like(one)) for one in weights]
    for step, given in enumerate(({}, {}, EVERY), 1):
        client.losses(model, 2 * step - 1, demonstrations())
        norm = math.sqrt(sum(float(one.grad.square().sum()) for one in weights))
        rate, beta1, beta2, eps, decay, most = {**DEFAULTS, **given}.values()
        assert norm > EVERY["grad_clip_norm"]
        for one, (weight, m, v) in zip(weights, states, strict=True):
            gradient = one.grad * min(1.0, most / norm)
            m.lerp_(gradient, 1 - beta1)
            v.lerp_(gradient**2, 1 - beta2)
            moved = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
            weight.mul_(1 - rate * decay).sub_(rate * moved)
        client.do("optim_step", model_id=model, seq_id=2 * step, adam_params=given)
        for one, (weight, *_) in zip(weights, states, strict=True):
            assert torch.allclose(one, weight, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_merged_weights_have_alpha_32_whatever_the_rank(server, client):
    base = dict(server[1].bases[NAME].model.named_parameters())
    for number, rank in enumerate((4, 8)):
        backend = server[1]._models[client.model(number, rank=rank)].backend
        stir(backend.model)
        tensors = dict(backend.model.named_parameters())
        pairs = [
            (tensors[name.replace("lora_A", "lora_B")], tensors[name]) for name in tensors if "lora_A" in name
        ]
        moved = (
            float((tensor - base[name]).norm()) for name, tensor in backend.own_weights() if name in base
        )
        expected = sorted(float((32 / rank * b @ a).norm()) for b, a in pairs)
        assert sorted(filter(None, moved)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("loss", "options", "change", "message"), [
    ("stable_reinforce", {}, {}, "Known: cispo"),
    ("pppo", {}, {}, "Did you mean 'ppo'"),
    ("ppo", {"clip_low": 0.8}, {}, "clip_low_threshold"),
    ("ppo", {"clip_low_threshold": "low"}, {}, "Accepted: a number"),
    ("ppo", {}, {"advantages": None}, "lacks advantages"),
    ("ppo", {}, {"weights": torch.ones(11)}, "unknown weights"),
    ("ppo", {}, {"logprobs": torch.zeros(3)}, "logprobs has the shape [3] and 3 numbers beside 11 input tokens"),
    ("ppo", {}, {"target_tokens": torch.full((11,), 10**6)}, "outside the vocabulary"),
    ("ppo", {}, {"target_tokens": torch.ones(11)}, "target_tokens is torch.float32"),
    ("ppo", {}, {"advantages": torch.full((11,), math.nan)}, "advantages has NaN or infinite"),
    ("ppo", {}, {"logprobs": torch.full((11,), -math.inf)}, "logprobs has NaN or infinite"),
])  # fmt: skip
def test_a_wrong_loss_is_answered_with_what_is_accepted(client, loss, options, change, message):
    tokens, inputs = rollouts()[0]
    inputs = {name: value for name, value in {**inputs, **change}.items() if value is not None}
    model = client.model()
    with pytest.raises(Refused) as caught:
        client.losses(model, 1, [(tokens, inputs)], loss, **options)
    assert caught.value.args[0] == "user" and message in caught.value.args[1]
    client.losses(model, 2, rollouts(), "ppo")  # the model goes on


def test_a_datum_beyond_the_context_is_refused(client):
    data = [([3] * length, {"target_tokens": torch.full((length,), 3), "weights": torch.ones(length)})
            for length in (512, 513)]  # fmt: skip
    model = client.model()
    client.losses(model, 1, data[:1], forward_only=True)
    with pytest.raises(Refused, match=r"datum 1 of 2.* has 513 input tokens. Accepted: .* 512"):
        client.losses(model, 2, data)


def test_a_step_on_a_gradient_that_is_not_finite_is_an_error(client):
    model, (tokens, inputs) = client.model(), rollouts()[0]
    unlikely = {**inputs, "logprobs": torch.full((11,), -1e9), "advantages": torch.ones(11)}
    before = client.losses(model, 1, demonstrations(), forward_only=True)[1]
    client.losses(model, 2, [(tokens, unlikely)], "importance_sampling")
    with pytest.raises(Refused, match="NaN or infinite, so optim_step discarded it"):
        client.do("optim_step", model_id=model, seq_id=3, adam_params=LEARNS)
    assert client.losses(model, 4, demonstrations())[1] == before
    assert client.do("optim_step", model_id=model, seq_id=5, adam_params=LEARNS)["metrics"]["grad_norm:mean"]


def gradient_and_step(client, model, seq, **given):
    client.losses(model, seq, demonstrations())
    client.do("optim_step", model_id=model, seq_id=seq + 1, adam_params=given or LEARNS)


@pytest.mark.parametrize(
    ("given", "at"), [({"learning_rate": 1e308}, 3), ({"weight_decay": 1e30}, 3), ({"eps": 0}, 1)]
)
def test_a_step_to_invalid_weights_changes_nothing(client, given, at):
    refused, plain = client.model(0, seed=6), client.model(1, seed=6)
    for model, steps in ((plain, (1, 3)), (refused, (1, 3, 5))):
        for seq in steps:
            if model == refused and seq == at:
                with pytest.raises(Refused, match="discarded the step and changed no weights"):
                    gradient_and_step(client, model, seq, **given)
            else:
                gradient_and_step(client, model, seq)
    pairs = ((refused, 7), (plain, 5))
    first, second = (client.losses(*pair, demonstrations(), forward_only=True)[1] for pair in pairs)
    assert first == second


@pytest.mark.parametrize(("asked", "message"), [
    ({"params": {"max_tokens": 0}}, "sampling_params.max_tokens=0 is not accepted: a whole number, 1 or above"),
    ({"params": {"max_tokens": 2.5}}, "sampling_params.max_tokens=2.5 is not accepted"),
    ({"params": {"temperature": "hot"}}, "sampling_params.temperature='hot' is not accepted"),
    ({"params": {"stop": 7}}, "sampling_params.stop=7 is not accepted"),
    ({"count": 0}, "num_samples=0 is not accepted"),
    ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs=-1 is not accepted: a whole number, 0 to 128"),
    ({"topk_sample_logprobs": -1}, "topk_sample_logprobs=-1 is not accepted"),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": 5}, "prompt_logprobs_last_n=5 .* Accepted: 1 to 4"),
    ({"tokens": [3, 10**6], "prompt_logprobs": True}, "token id 1000000. Accepted: 0 to"),
    ({"tokens": [3, 4.5]}, r"token id 4\.5\. Accepted: 0 to"),
    ({"tokens": [3] * 512, "prompt_logprobs": True}, "has 512 tokens. Accepted: 1 to 511"),
    ({"tokens": [3] * 513, **SCORED}, "has 513 tokens. Accepted: 1 to 512"),
    ({"tokens": [], "prompt_logprobs": True}, "has 0 tokens. Accepted: 1 to 511"),
])  # fmt: skip
def test_a_sample_that_cannot_be_drawn_is_refused_by_name(client, asked, message, caplog):
    sampler = client.sampler(base_model=NAME)
    with pytest.raises(Refused, match=message):
        client.sample(sampler, 0, **{"tokens": [3, 4, 5, 6], **asked})
    gc.collect()
    assert not caplog.records  # only the client gets the error


def test_a_prompt_that_fills_the_context_can_be_scored(client):
    ids = torch.randint(3, 300, (513,), generator=torch.Generator().manual_seed(2))
    inputs = {"target_tokens": ids[1:], "weights": torch.ones(512)}
    (expected,), _ = client.losses(client.model(), 1, [(ids[:-1].tolist(), inputs)], forward_only=True)
    found = client.sample(client.sampler(base_model=NAME), 0, ids[:-1].tolist(), **SCORED)
    assert torch.allclose(found.prompt_logprobs[1:], expected[:-1], atol=1e-4)
    assert (found.tokens, found.stops) == ([[]], ["length"])


@pytest.mark.parametrize(("given", "message"), [
    ({"learning_rate": -1.0}, "adam_params.learning_rate=-1.0 is not accepted"),
    ({"beta1": 1.5}, "adam_params.beta1=1.5 is not accepted"),
    ({"beta2": "x"}, "adam_params.beta2='x' is not accepted"),
    ({"eps": -1e-8}, "adam_params.eps=-1e-08 is not accepted"),
    ({"weight_decay": math.inf}, "adam_params.weight_decay=inf is not accepted"),
    ({"grad_clip_norm": -1}, "adam_params.grad_clip_norm=-1 is not accepted"),
    ({"lr": 1e-4}, "Known: beta1, beta2, eps, grad_clip_norm, learning_rate, weight_decay"),
])  # fmt: skip
def test_errors_of_a_step_name_what_the_client_wrote(client, given, message):
    with pytest.raises(Refused, match=message) as caught:
        client.do("optim_step", model_id=client.model(), seq_id=1, adam_params=given)
    assert caught.value.args[0] == "user"


def lists(shape, *parts):
    """Return a sparse tensor of row ends, columns and values."""
    data = [torch.tensor(part, dtype=torch.long).numpy().tobytes() for part in (*parts, (), ())]
    encoded = message("Sparse", rows=data[0], columns=data[1], values=data[2])
    return message("Tensor", dtype=2, shape=shape, sparse=encoded)


@pytest.mark.parametrize("targets", [
    lists([3, 10**7], [0, 0, 0, 0]),
    lists([10**7, 4], [0, 0, 0, 0]),
    lists([3, 4], [0, 0, 0, 10**7]),
    lists([3, 4], [0, 2, 1, 1], [0], [7]),
    lists([3, 4], [0, 1, 1, 1], [-1], [7]),
    message("Tensor", dtype=2, shape=[-3, -1], dense=bytes(24)),
    message("Tensor", dtype=2, shape=[2], dense=bytes(16)),
    message("Tensor", dtype=2, shape=[3], dense=bytes(16)),
])  # fmt: skip
def test_shapes_are_checked_before_tensors_are_built(targets):
    with pytest.raises(DataError, match=r"targets has the shape .* beside 3 input tokens"):
        tensor_of("targets", targets, 3)


def test_the_numbers_of_a_request_are_bounded_together():
    targets = message("Tensor", dtype=2, shape=[1 << 20, 128], sparse=message("Sparse"))
    request = message("Request", data=[message("Datum", inputs={"targets": targets})])
    with pytest.raises(DataError, match="134,217,728 numbers"):
        read_forward_backward(request)


@pytest.mark.parametrize(
    "number", ["x/../../thesis", "1", 1.5, 1e30, math.nan, True, -1, 2**64, [1], "9" * 300]
)
def test_numbers_of_requests_are_bounded_whole_numbers(client, number):
    made = {"session_id": client.session, "sampling_session_seq_id": 1, "base_model": NAME}
    known = {"model_id": client.model(), "sampling_session_id": client.sampler(base_model=NAME), "path": "x"}
    prompt = {"prompt": {"chunks": []}, "optimizer": True}
    for verb, fields in (
        ("create_model", {"model_seq_id": number}),
        ("load_weights", {"model_seq_id": number}),
        ("optim_step", {"seq_id": number}),
        ("create_sampling_session", {"sampling_session_seq_id": number}),
        ("asample", {"seq_id": number}),
        ("asample", {"seq_id": 1, "num_samples": number}),
    ):
        with pytest.raises(Refused, match="is not accepted") as caught:
            client.call(verb, **made | known | prompt | fields)
        assert caught.value.args[0] == 400
    with pytest.raises(Refused, match="is not accepted") as caught:
        client.do(
            "save_weights_for_sampler", model_id=known["model_id"], seq_id=1, sampling_session_seq_id=number
        )
    assert caught.value.args[0] == "user"


@pytest.mark.parametrize(("verb", "fields"), [
    ("save_weights", {"path": "x" * 300}),
    ("save_weights", {"path": 5}),
    ("save_weights", {"path": "n", "overwrite": "yes"}),
    ("save_weights_for_sampler", {"path": "a/b"}),
    ("load_weights", {"path": 5, "optimizer": True}),
    ("load_weights", {"optimizer": True}),
    ("optim_step", {"adam_params": [1]}),
    ("optim_step", {"adam_params": {"learning_rate": 10**400}}),
])  # fmt: skip
def test_refused_fields_of_a_turn_leave_no_gap(client, verb, fields):
    model = client.model()
    with pytest.raises(Refused) as caught:
        client.do(verb, model_id=model, seq_id=1, **fields)
    kind, text = caught.value.args
    assert kind == "user" and "is" in text and "Error" not in text
    client.do("optim_step", model_id=model, seq_id=2)


def test_an_address_does_not_tell_who_trains(client):
    model = client.model()
    path = client.do("save_weights", model_id=model, seq_id=1, path="one")["path"]
    run = path.split("/")[2]
    for verb in ("optim_step", "unload_model", "session_heartbeat"):
        with pytest.raises(Refused, match="unknown"):
            client.call(verb, model_id=run, session_id=run, seq_id=2)
    assert client.session not in path and model not in path


def test_heavy_work_is_done_beside_the_event_loop(client, monkeypatch):
    loops, damage, parse = [], manifest.damage, http.parse

    def noted(function):
        def call(*given):
            loops.append(asyncio._get_running_loop())
            return function(*given)

        return call

    model = client.model()
    path = client.do("save_weights_for_sampler", model_id=model, seq_id=1, path="beside")["path"]
    monkeypatch.setattr(manifest, "damage", noted(damage))
    monkeypatch.setattr(http, "parse", noted(parse))
    client.sampler(model_path=path)
    client.call("weights_info", tinker_path=path)
    client.losses(model, 2, demonstrations(), forward_only=True)
    assert loops == [None] * 3


def test_bodies_are_bounded_but_those_that_bring_data(client):
    long = b'{"a": "' + bytes([120]) * (5 << 20) + b'"}'
    with pytest.raises(Refused, match="Maximum request body size") as caught:
        client.post("create_session", long)
    assert caught.value.args[0] == 413
    request = message("Request", model_id=client.model(), seq_id=1, loss_fn="x" * (5 << 20))
    with pytest.raises(Refused, match="loss_fn"):
        client.wait(client.post("forward_backward", request.SerializeToString(), "application/x-protobuf"))


def test_a_key_of_any_bytes_is_refused(server):
    connection = HTTPConnection(server[0].removeprefix("http://"), timeout=60)
    connection.putrequest("GET", "/api/v1/healthz")
    connection.putheader("X-API-Key", b"tml-t\xe9st")
    connection.endheaders()
    assert connection.getresponse().status == 401


def test_requests_that_cannot_be_served_are_refused_by_name(server, client):
    model = client.model()
    refused = [
        (lambda: Client(server[0], key="tml-other"), 401, "TINKER_API_KEY"),
        (lambda: client.call("copy_weights"), 404, "copy_weights is not available"),
        (lambda: client.call("optim_step"), 400, "optim_step.model_id is missing"),
        (
            lambda: client.call("optim_step", model_id="gone:train:0", seq_id=1),
            404,
            "begin again from saved weights",
        ),
        (lambda: client.call("retrieve_future", request_id="gone"), 410, "unknown"),
        (lambda: client.sampler(base_model="other"), 400, "--model other=DIRECTORY"),
        (lambda: client.sampler(model_path="tinker://a/sampler_weights/b"), 400, "it was not found"),
        (lambda: client.sampler(model_path="tinker://../sampler_weights/b"), 400, "not a name"),
        (lambda: client.model(7, base_model="other"), "user", "--model other=DIRECTORY"),
        (lambda: client.model(8, train_mlp=False, train_attn=False), "user", "nothing would train"),
        (lambda: client.model(9, rank=-1), "user", "lora_config.rank=-1 is not accepted"),
        (
            lambda: client.model(12, rank=10**6),
            "user",
            "rank=1000000 is not accepted. Accepted: at most",
        ),
        (lambda: client.model(10, train_mlp="no"), "user", "lora_config.train_mlp='no' is not accepted"),
        (
            lambda: client.do("optim_step", model_id=model, seq_id=1, optimizer_params={"type": "dimuon"}),
            "user",
            "adamw",
        ),
        (
            lambda: client.sample(client.sampler(base_model=NAME), 0, [3], record_stability_info=True),
            "user",
            "record_stab",
        ),
        (lambda: client.do("save_weights", model_id=model, seq_id=2, path="../x"), "user", "letters, digits"),
    ]
    for ask, kind, problem in refused:
        with pytest.raises(Refused) as caught:
            ask()
        assert caught.value.args[0] == kind and problem in caught.value.args[1], caught.value.args
    wanted = message(
        "Request", model_id=model, seq_id=3, loss_fn="ppo", data=[message("Datum", chunks=[message("Chunk")])]
    )
    for body, problem in ((wanted.SerializeToString(), "image or sound"), (b"\x0a\xff", "protobuf")):
        with pytest.raises(Refused, match=problem):
            client.wait(client.post("forward_backward", body, "application/x-protobuf"))
    client.losses(model, 4, rollouts(), "ppo")  # no refusal leaves a gap in the order


def test_saved_weights_continue_with_the_optimizer_or_without(client):
    data = demonstrations()

    def step(model, seq):
        client.losses(model, seq, data)
        client.do("optim_step", model_id=model, seq_id=seq + 1, adam_params=LEARNS)
        return client.losses(model, seq + 2, data, forward_only=True)[1]["loss:sum"]

    model = client.model(seed=1)
    step(model, 1)
    path = client.do("save_weights", model_id=model, seq_id=4, path="one")["path"]
    assert path == f"tinker://{run_of(model)}/weights/one" and client.session not in path
    with pytest.raises(Refused, match="exists"):
        client.do("save_weights", model_id=model, seq_id=5, path="one")
    gone_on = step(model, 6)
    found = []
    for number, optimizer in ((1, True), (2, False)):
        made = client.do(
            "load_weights", session_id=client.session, model_seq_id=number, path=path, optimizer=optimizer
        )
        found.append(step(made["model_id"], 1))
    assert found[0] == gone_on and found[1] != pytest.approx(gone_on, rel=1e-4)
    client.do("load_weights", model_id=model, seq_id=9, path=path, optimizer=True)
    assert step(model, 10) == gone_on
    with pytest.raises(Refused, match="one has lora_rank=4, and this model 8"):
        client.do("load_weights", model_id=client.model(3, rank=8), seq_id=1, path=path, optimizer=True)
    assert client.call("weights_info", tinker_path=path) == {
        "base_model": NAME,
        "is_lora": True,
        "lora_rank": 4,
    }


@pytest.mark.parametrize("rank", [4, 0])
def test_samples_come_from_the_weights_as_they_were_saved(client, rank):
    """Rank 0 trains the whole model."""
    model, data, prompt = client.model(rank=rank), demonstrations(), sequences()[0].tolist()
    for seq in (1, 3, 5):
        client.losses(model, seq, data)
        client.do("optim_step", model_id=model, seq_id=seq + 1, adam_params=LEARNS)
    (expected,), _ = client.losses(model, 7, data[:1], forward_only=True)
    passing = client.do("save_weights_for_sampler", model_id=model, seq_id=8, sampling_session_seq_id=50)
    named = client.do("save_weights_for_sampler", model_id=model, seq_id=9, path="kept")["path"]
    client.losses(model, 10, data)
    client.do("optim_step", model_id=model, seq_id=11, adam_params=LEARNS)
    assert client.call("get_info", model_id=model)["lora_rank"] == rank
    targets = {"data": [*prompt[1:-1], -1], "dtype": "int64", "shape": [len(prompt) - 1, 1]}
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 3, "target_prompt_logprobs": targets}
    for sampler, path in ((passing["sampling_session_id"], None), (client.sampler(model_path=named), named)):
        described = {"sampler_id": sampler, "base_model": NAME, "model_path": path}
        assert client_get(client, f"samplers/{sampler}") == described
        found = client.sample(sampler, 0, prompt, 2, {"seed": 1}, **asked)
        own = found.prompt_logprobs
        assert own[0].isnan() and torch.allclose(own[1:], expected, atol=1e-4)
        assert (
            torch.allclose(found.targets[:-1, 0], expected[:-1], atol=1e-4) and found.targets[-1, 0].isnan()
        )
        assert found.likely[0].shape == (len(prompt), 3) and (found.likely[1][1:, 0] >= own[1:]).all()
        assert (
            found.tokens == client.sample(sampler, 1, prompt, 2, {"seed": 1}).tokens
            and found.tokens[0] != found.tokens[1]
        )
        whole = prompt + found.tokens[0]
        scored = client.sample(sampler, 2, whole, prompt_logprobs=True).prompt_logprobs
        assert torch.allclose(scored[len(prompt) :], found.logprobs[0], atol=1e-4)
    base = client.sample(client.sampler(base_model=NAME), 0, prompt, prompt_logprobs=True).prompt_logprobs
    assert not torch.allclose(base[1:], expected, atol=1e-2)


def test_sampled_tokens_are_among_their_own_likeliest(client):
    sampler, prompt = client.sampler(base_model=NAME), sequences()[0].tolist()
    found = client.sample(sampler, 0, prompt, 4, {"seed": 3, "temperature": 0.5}, topk_sample_logprobs=128)
    known = []
    for ids, logprobs, (tokens, values) in zip(*found[:2], found.sampled_likely, strict=True):
        among = tokens == torch.tensor(ids)[:, None]
        known += (values[among] - logprobs[among.any(1)]).abs().tolist()
    assert len(known) > 8 and max(known) < 1e-4


def test_weights_saved_under_a_deleted_name_are_sampled(client):
    model, data, prompt = client.model(), demonstrations(), sequences()[0].tolist()

    def saved(seq):
        made = {"model_id": model, "seq_id": seq, "path": "again"}
        address = client.do("save_weights_for_sampler", **made)["path"]
        sampler = client.sampler(model_path=address)
        return sampler, client.sample(sampler, 0, prompt, prompt_logprobs=True).prompt_logprobs[1:]

    sampler, before = saved(1)
    client.losses(model, 2, data)
    client.do("optim_step", model_id=model, seq_id=3, adam_params=LEARNS)
    client.post(f"training_runs/{model}/checkpoints/sampler_weights/again", None, method="DELETE")
    _, after = saved(4)
    (expected,), _ = client.losses(model, 5, data[:1], forward_only=True)
    assert torch.allclose(after, expected, atol=1e-4) and not torch.allclose(after, before, atol=1e-2)
    with pytest.raises(Refused, match="sampling session"):
        client.sample(sampler, 1, prompt)


def test_an_empty_list_of_stops_never_stops():
    stops = {"never": [], "id": [3], "text": "None", "default": None}
    params = {name: params_of({"stop": stop}, 8) for name, stop in stops.items()}
    assert [name for name, one in params.items() if one.ignore_eos] == ["never"]
    assert params["id"].stop_token_ids == (3,) and params["text"].stop == ("None",)
    with pytest.raises(ConfigError, match="65 items"):
        params_of({"stop": ["a"] * 65}, 8)


def test_a_stop_ends_a_sample_and_is_its_last_token(client):
    sampler, prompt = client.sampler(base_model=NAME), sequences()[0].tolist()
    free = client.sample(sampler, 0, prompt, params={"temperature": 0.0})
    stopped = client.sample(sampler, 1, prompt, params={"temperature": 0.0, "stop": [free.tokens[0][2]]})
    assert stopped.tokens[0] == free.tokens[0][: free.tokens[0].index(free.tokens[0][2]) + 1]
    assert stopped.stops == ["stop"] and free.stops == ["length"]
    surrogate = client.sample(sampler, 2, prompt, params={"temperature": 0.0, "stop": "\ud800"})
    assert surrogate.tokens == free.tokens  # it once failed the samples of all clients


def test_adapters_share_the_tensors_of_their_base(server, client):
    first, second = client.model(0), client.model(1, rank=8)
    base = server[1].bases[NAME].model
    shared = {parameter.data_ptr() for parameter in base.parameters()}
    for model_id in (first, second):
        frozen = [
            one for one in server[1]._models[model_id].backend.model.parameters() if not one.requires_grad
        ]
        assert frozen and {one.data_ptr() for one in frozen} == shared
    data = demonstrations()
    before = client.losses(second, 1, data, forward_only=True)[1]
    client.losses(first, 1, data)
    client.do("optim_step", model_id=first, seq_id=2, adam_params=LEARNS)
    assert client.losses(second, 2, data, forward_only=True)[1] == before


def test_a_home_directory_of_a_model_is_expanded(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "empty").mkdir()
    words = ["serve", "tinker", "--model", "m=~/empty", "--output", str(tmp_path / "out"), "--port", "0"]
    assert main(words) == 1
    assert f"{tmp_path}/empty' cannot be loaded" in " ".join(capsys.readouterr().err.split())


def test_a_model_of_the_hub_is_served_by_its_name(model_dir, tmp_path):
    name, kept = "org/name", ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")
    put_into_cache(tmp_path / "hf" / "hub", name, model_dir)
    environment = {key: os.environ[key] for key in kept if key in os.environ}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "TINKER_API_KEY": KEY}
    words = (sys.executable, "-m", "rl4llm", "serve", "tinker", "--port", "0", "--model", name)
    with subprocess.Popen(words, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as served:
        try:
            url = next(line.split()[0] for line in served.stderr if line.startswith("http"))
            client = Client(url)
            info = client.call("get_info", model_id=client.model(base_model=name))
            assert info["model_data"]["tokenizer_id"] == name  # the client takes it from its own cache
            assert client.sample(client.sampler(base_model=name), 0, [3, 4]).tokens
        finally:
            served.kill()


def test_a_client_without_a_heartbeat_frees_what_it_had(model_dir, tmp_path):
    with served_here(model_dir, tmp_path, idle_s=0.0) as (url, service):
        client = Client(url)
        service._idle_s = 1000.0
        model = client.model()
        client.do("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
        kept = client.do("save_weights", model_id=model, seq_id=2, path="kept")["path"]
        service._idle_s = 0.0
        service.tidy()
        with pytest.raises(Refused, match="unknown"):
            client.call("session_heartbeat", session_id=client.session)
        service._idle_s = 1000.0
        other = Client(url)
        other.model()  # behind the job that frees
        assert model not in service._models and not (tmp_path / model / "passing").exists()
        other.do("load_weights", session_id=other.session, model_seq_id=1, path=kept, optimizer=True)


def pass_time(served, seconds):
    served._tidied -= seconds
    served.tidy()


def test_time_in_which_the_server_stood_still_ends_nothing(server, client, monkeypatch):
    monkeypatch.setattr(server[1], "_idle_s", service.IDLE_S)
    model = client.model()
    waits = client.call("optim_step", model_id=model, seq_id=2)
    pass_time(server[1], 1000.0)
    client.call("optim_step", model_id=model, seq_id=1)
    client.wait(waits)
    for _ in range(13):
        pass_time(server[1], 9.9)
    with pytest.raises(Refused, match="unknown"):
        client.call("session_heartbeat", session_id=client.session)


@pytest.mark.parametrize(
    "verb", ["session_heartbeat", "get_info", "optim_step", "asample", "retrieve_future", "create_model"]
)
def test_every_request_is_a_sign_of_life(server, client, monkeypatch, verb):
    monkeypatch.setattr(server[1], "_idle_s", service.IDLE_S)
    model, sampler = client.model(), client.sampler(base_model=NAME)
    request_id = client.call("optim_step", model_id=model, seq_id=1)["request_id"]
    fields = {"session_id": client.session, "model_id": model, "sampling_session_id": sampler, "request_id": request_id,
              "seq_id": 1, "model_seq_id": 0, "prompt": {"chunks": [{"tokens": [3]}]}}  # fmt: skip
    for _ in range(20):
        pass_time(server[1], 9.9)
        client.call(verb, **fields)


def kill_amid_steps_and_saves(client, model, pid):
    """Queue steps and saves from request 6 on, and kill the server when the fourth save is done."""
    saves = []
    for seq in range(6, 30, 3):
        client.ask_losses(model, seq, demonstrations())
        client.call("optim_step", model_id=model, seq_id=seq + 1, adam_params=LEARNS)
        saves.append(client.call("save_weights", model_id=model, seq_id=seq + 2, path=f"s{seq}"))
    client.wait(saves[3])
    os.kill(pid, signal.SIGKILL)


def load_all(client, model, directory):
    """Load all weights of a model, by requests from 2 on; return how many there are."""
    names = {path.name for path in directory.iterdir()}
    assert names >= {"s", "s6", "s9", "s12", "s15"}
    for seq, name in enumerate(sorted(names), 2):
        address = f"tinker://{directory.parent.name}/weights/{name}"
        client.do("load_weights", model_id=model, seq_id=seq, path=address, optimizer=True)
    return len(names)


def test_saved_weights_outlive_a_killed_server(model_dir, tmp_path):
    data, prompt = demonstrations(), sequences()[0].tolist()
    with served_apart(model_dir, tmp_path) as (url, pid):
        client = Client(url)
        model = client.model()
        client.losses(model, 1, data)
        client.do("optim_step", model_id=model, seq_id=2, adam_params=LEARNS)
        state = client.do("save_weights", model_id=model, seq_id=3, path="s")["path"]
        weights = client.do("save_weights_for_sampler", model_id=model, seq_id=4, path="w")["path"]
        expected = client.losses(model, 5, data, forward_only=True)
        kill_amid_steps_and_saves(client, model, pid)
    unfinished = tmp_path / model / "weights" / "t~00"
    unfinished.mkdir()
    with served_apart(model_dir, tmp_path) as (url, _):
        client = Client(url)
        made = client.do(
            "load_weights", session_id=client.session, model_seq_id=0, path=state, optimizer=True
        )
        logprobs, metrics = client.losses(made["model_id"], 1, data, forward_only=True)
        assert metrics == expected[1] and torch.equal(logprobs[0], expected[0][0])
        found = client.sample(client.sampler(model_path=weights), 0, prompt, prompt_logprobs=True)
        assert torch.allclose(found.prompt_logprobs[1:], logprobs[0], atol=1e-4)
        assert not unfinished.exists()
        count = load_all(client, made["model_id"], tmp_path / model / "weights")
        (tmp_path / model / "weights" / "s" / "weights.safetensors").write_bytes(b"damaged")
        with pytest.raises(Refused, match="instead of"):
            client.do("load_weights", model_id=made["model_id"], seq_id=2 + count, path=state, optimizer=True)


def test_the_compiled_messages_are_those_of_the_published_file(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc")
    into = tmp_path / "compiled"
    assert protoc.main(["", f"-I{COMPILED.parent}", f"--descriptor_set_out={into}", "messages.proto"]) == 0
    assert into.read_bytes() == COMPILED.read_bytes()


def test_the_server_names_the_models_that_it_has(client):
    (model,) = json.loads(json.dumps(client_get(client, "get_server_capabilities")))["supported_models"]
    assert model == {"model_name": NAME, "max_context_length": 512, "trainable": True, "sampleable": True}


def client_get(client, path):
    import urllib.request

    request = urllib.request.Request(f"{client.url}/api/v1/{path}", headers={"X-API-Key": KEY})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())
