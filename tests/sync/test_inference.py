"""An engine takes over the trainer's weights and proves it, with a trainer around it or without one."""

import asyncio
import copy
from dataclasses import replace

import pytest
import torch

from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import EngineError, StaleWeightsError, UnreachableError
from rl4llm.inference.local import LocalClient
from rl4llm.sync.inference import Inference, MemoryPublisher
from rl4llm.sync.verify import Canary


@pytest.fixture
def backend(model):
    return TorchBackend(load_model(model), lr=1e-3)


def test_weights_are_published_without_a_trainer(backend, tokenizer):
    client = LocalClient(backend.model, tokenizer)
    inference = Inference(client, MemoryPublisher(client))
    inference.publish(backend, version=3)
    assert inference.run(client.version()) == 3
    inference.close()


def test_the_canary_stops_what_did_not_reach_the_engine(backend, tokenizer):
    apart = copy.deepcopy(backend.model)
    with torch.no_grad():
        apart.get_input_embeddings().weight.mul_(1.5)
    client = LocalClient(apart, tokenizer)
    canary = Canary(client.vocab_size, dtype="float32")
    inference = Inference(client, MemoryPublisher(client), canary)
    with pytest.raises(StaleWeightsError):
        inference.publish(backend, version=3)
    inference.close()


class Counted(LocalClient):
    """An engine that counts what it generates; `error` is raised instead, `length` cuts its completions."""

    error = length = None
    generated = 0

    async def generate(self, prompt_ids, sampling_params, *, session=""):
        self.generated += 1
        if self.error:
            raise self.error
        completion = await super().generate(prompt_ids, sampling_params, session=session)
        kept = slice(self.length)
        return replace(completion, token_ids=completion.token_ids[kept], logprobs=completion.logprobs[kept])


class Several(LocalClient):
    """A client with several engines behind it."""

    parts = ()

    def engines(self):
        return self.parts


@pytest.fixture
def counted(backend, tokenizer):
    return Counted(backend.model, tokenizer)


def sampled(client):
    """Return the random tokens of a canary, and those that it has after `sample`."""
    canary = Canary(client.vocab_size, dtype="float32")
    return canary.token_ids_BT, asyncio.run(canary.sample(client))


def test_the_canarys_tokens_are_sampled_once_before_publishing(backend, counted):
    canary = Canary(counted.vocab_size, dtype="float32")
    random_BT, versions = canary.token_ids_BT, []
    inference = Inference(counted, MemoryPublisher(counted), canary)
    for version in (3, 4):
        inference.publish(backend, version=version)
        versions.append(canary.token_ids_BT)
    assert counted.generated == len(random_BT)
    assert torch.equal(*versions)
    assert (versions[0] != random_BT).float().mean() > 0.9
    inference.close()


def test_every_run_of_a_model_samples_the_same_tokens(backend, counted, tokenizer):
    other = LocalClient(backend.model, tokenizer, deterministic=True)
    assert torch.equal(sampled(counted)[1], sampled(other)[1])


def test_tokens_after_an_early_end_are_random_ones(counted):
    counted.length = 5
    random_BT, token_ids_BT = sampled(counted)
    assert torch.equal(token_ids_BT[:, 6:], random_BT[:, 6:])
    assert not torch.equal(token_ids_BT[:, :6], random_BT[:, :6])


@pytest.mark.parametrize("error", [UnreachableError("nobody"), EngineError("asleep"), TimeoutError()])
def test_without_an_engine_that_samples_tokens_are_random(backend, counted, tokenizer, error):
    counted.error = error
    random_BT, token_ids_BT = sampled(counted)
    assert torch.equal(token_ids_BT, random_BT)
    client = Several(backend.model, tokenizer)
    client.parts = (counted, Counted(backend.model, tokenizer))
    random_BT, token_ids_BT = sampled(client)  # the next one is asked
    assert not torch.equal(token_ids_BT, random_BT)


def test_an_engine_that_lends_its_device_samples_no_tokens(counted):
    counted.awake = True  # as far as this client knows: an earlier run may have left it asleep
    random_BT, token_ids_BT = sampled(counted)
    assert (torch.equal(token_ids_BT, random_BT), counted.generated) == (True, 0)


def tokens_of_rank(ranks, model, tokenizer):
    """Publish on a rank whose engine would sample other tokens, and return those that its canary has."""
    backend = TorchBackend(load_model(model), lr=1e-3)
    if not ranks.is_first:
        with torch.no_grad():
            backend.model.lm_head.weight.mul_(-1)
    client = Counted(backend.model, tokenizer)
    inference = Inference(
        client, MemoryPublisher(client), Canary(client.vocab_size, dtype="float32"), ranks=ranks
    )
    inference.publish(backend, version=0)
    inference.close()
    return inference.canary.token_ids_BT.tolist(), client.generated


def test_all_ranks_score_the_tokens_of_the_first(on_ranks, model, tokenizer):
    (first, asked), (second, asked_second) = on_ranks(tokens_of_rank, model, tokenizer)
    assert first == second == sampled(LocalClient(load_model(model), tokenizer))[1].tolist()
    assert (asked, asked_second) == (2, 0)
