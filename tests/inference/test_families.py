"""Every family that docs/families.md lists is sampled and trained as its own forward computes it."""

import asyncio
from functools import cache

import pytest
import sweeps
import torch
from families import (
    FAMILIES,
    PROMPT,
    SAMPLE,
    build,
    cut_conversation,
    difference,
    generated,
    greedy_tokens,
    listed,
    measure,
    own_logprobs,
    plain,
    trajectory_of,
)
from safetensors.torch import load_file

from rl4llm.backends.lora import adapter_size, add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.types import SamplingParams, TokenSpan
from rl4llm.inference.local import LocalClient

RECURRENT = ("Qwen3-Next", "Qwen3.5 text", "LFM2")
LIMIT = 1e-5  # of log-probs in float32
measured = cache(measure)


@pytest.mark.parametrize("name", sweeps.sampled(FAMILIES, SAMPLE))
def test_a_family_samples_what_its_own_forward_says(name):
    row = measured(name)
    assert row.greedy_tokens_equal
    assert row.engine_difference <= LIMIT
    assert row.step_difference <= LIMIT  # with the weights after an optimizer step
    assert (row.prompts, row.turns) == ("once", "appended")


@pytest.mark.parametrize("name", sweeps.sampled(FAMILIES, ["Llama", "Llama 4 text"]))
def test_a_loaded_model_computes_what_transformers_does(name):
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            build(name)(ids).logits, plain(name)(ids).logits, atol=10 * LIMIT, rtol=LIMIT
        )


@pytest.mark.parametrize("name", sweeps.sampled(FAMILIES, SAMPLE))
def test_a_family_trains_on_the_plain_models_gradient(name):
    row = measured(name)
    assert row.trainer_difference <= LIMIT
    assert row.gradient_difference <= 10 * LIMIT


@pytest.mark.parametrize("name", sweeps.sampled(FAMILIES, SAMPLE))
def test_the_page_of_families_has_the_measured_row(name):
    assert listed(name) == measured(name).facts


# dense, recurrent, experts, a router that is a layer, one with a buffer, norms after layers
@pytest.mark.parametrize(
    "name",
    sweeps.sampled(
        FAMILIES, ["Llama", "Qwen3.5 text", "Qwen3-MoE", "Phi-3.5-MoE", "DeepSeek-V3", "Gemma 3 text"]
    ),
)
def test_an_adapted_family_is_published_and_exported_merged(name, tokenizer, tmp_path):
    model, planned = build(name), adapter_size(build(name), 2)
    backend = TorchBackend(model, adapter=add_adapter(model, rank=2), lr=0.0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == planned
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    params = SamplingParams(max_tokens=9, seed=3, ignore_eos=True)
    [found] = LocalClient(model, tokenizer).generate_batch([PROMPT], [params])
    spans = TokenSpan.context(PROMPT), TokenSpan(found.token_ids, "policy", found.logprobs, 0)
    sampled = trajectory_of(0, spans)
    backend.export(tmp_path)
    merged = load_model(tmp_path, device="cpu")
    with torch.no_grad():
        assert difference(own_logprobs(merged, sampled), sampled) <= 10 * LIMIT
        assert difference(own_logprobs(build(name), sampled), sampled) > 0.05
    published = dict(backend.weights())
    for file, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(published.pop(file), tensor), file
    assert not published


def test_a_window_hides_tokens_but_does_not_shorten_the_context(tokenizer):
    for name in ("gpt-oss", "Mistral"):
        model = build(name)
        client = LocalClient(model, tokenizer)
        assert client.context_length == 96
        assert greedy_tokens(client, [PROMPT]) == [generated(model, PROMPT)]


def test_a_recurrent_conversation_that_is_cut_is_computed_again(tokenizer):
    for name in RECURRENT:
        model = build(name)
        client = LocalClient(model, tokenizer)
        assert cut_conversation(client, model)
        assert asyncio.run(client.health())["reused_tokens"] == 0


@pytest.mark.parametrize("name", ["Qwen3.5 text", "gpt-oss", "Gemma 4 text"])
def test_families_decode_under_autocast(name, tokenizer):
    model = build(name)
    client = LocalClient(model, tokenizer, autocast="bfloat16")
    TorchBackend(model, autocast="bfloat16")
    [found] = client.generate_batch(
        [[5, 9, 40, 33]], [SamplingParams(max_tokens=12, seed=3, ignore_eos=True)]
    )
    assert len(found.token_ids) == 12


def test_recurrent_rows_of_unequal_length_do_not_mix(tokenizer):
    prompts = [[5, 9, 40], [8], [61, 7], [12, 13, 200, 4, 90, 31], [77, 2], [5, 9, 40, 33, 8]]
    for name in RECURRENT:
        model = build(name)
        client = LocalClient(model, tokenizer, max_rows=3)  # so that rows leave and others take their places
        assert greedy_tokens(client, prompts) == [generated(model, ids) for ids in prompts]


def test_forms_that_cost_more_are_reported_once(tokenizer):
    for name, trained, sampled in (
        ("Gemma 2", 1, 1),
        ("Qwen3.5 text", 0, 1),
        ("gpt-oss", 0, 1),
        ("Llama", 0, 0),
    ):
        model, warned = build(name), []
        LocalClient(model, tokenizer).report_to(warned.append)
        lines = TorchBackend(model).warnings()
        assert (len(lines), len(warned)) == (trained, sampled), name
        assert all("trains on padded rows, since Gemma2Attention uses softcap" in line for line in lines)
        assert (name in RECURRENT) == any("computed again from its start" in line for line in warned)
