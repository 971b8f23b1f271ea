"""Under autocast and in bfloat16 the engine computes with the trainer's recipe: both round in the same places."""

import asyncio
import copy

import pytest
import torch
from sweeps import sampled
from torch import nn

from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.model_memory import EngineLoad, Precision
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.inspect.plan.shape import shape_of
from rl4llm.inference.embedded.precision import AutocastCopy, Projections, in_float32
from rl4llm.inference.local import LocalClient
from rl4llm.sync.verify import _batch

PROMPT = [5, 9, 33, 12, 7, 21, 40]
SAMPLED = [SamplingParams(seed=seed, max_tokens=40, ignore_eos=True) for seed in range(6)]
WAYS = [("fast", 1), ("fast", 10**9), ("model", 1)]


def loud(build, name):
    """Build a model whose logits differ widely, as those of a trained one do."""
    model = build(name)
    with torch.no_grad():
        model.model.norm.weight *= 6
    return model


def differences(backend, completions):
    """Return how far the trainer's log-probs of sampled tokens are from the engine's, one number per token."""
    found = []
    for completion in completions:
        ids = torch.tensor([[*PROMPT, *completion.token_ids]])
        logprobs = backend.forward(_batch(ids))[0, len(PROMPT) :]
        found.append((logprobs - torch.tensor(completion.logprobs)).abs())
    return torch.cat(found)


def own_difference(backend, model, completions):
    """Return how far two forwards of the same model are apart: the trainer's, and one with a cache token by token."""
    found = []
    for completion in completions:
        ids = torch.tensor([[*PROMPT, *completion.token_ids]])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.float32):
            output = model(ids[:, : len(PROMPT)], use_cache=True)
            logits = [output.logits[0, -1]]
            for token in ids[0, len(PROMPT) : -1]:
                output = model(token.view(1, 1), past_key_values=output.past_key_values, use_cache=True)
                logits.append(output.logits[0, -1])
        logprobs_TV = torch.stack(logits).float().log_softmax(-1)
        own = logprobs_TV.gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
        found.append((backend.forward(_batch(ids))[0, len(PROMPT) :] - own).abs())
    return torch.cat(found).mean()


@pytest.mark.parametrize(("path", "share_from"), WAYS)
@pytest.mark.parametrize("recipe", sampled(["autocast", "bfloat16"], ["autocast"]))
def test_engine_and_trainer_differ_as_two_forwards_do(build, tokenizer, path, share_from, recipe):
    model = loud(build, "qwen3")
    model = model.to(torch.bfloat16) if recipe == "bfloat16" else model
    autocast = "bfloat16" if recipe == "autocast" else "none"
    backend = TorchBackend(model, autocast=autocast)
    client = LocalClient(model, tokenizer, path=path, share_from=share_from, autocast=autocast)
    completions = client.generate_batch([PROMPT] * 6, SAMPLED)
    assert asyncio.run(client.health())["path"] == path
    assert differences(backend, completions).mean() < 2 * own_difference(backend, model, completions)


def test_without_the_recipe_engine_and_trainer_differ_more(build, tokenizer):
    model = loud(build, "qwen3")
    backend = TorchBackend(model, autocast="bfloat16")
    means = []
    for autocast in ("bfloat16", "none"):
        client = LocalClient(model, tokenizer, path="model", autocast=autocast)
        means.append(differences(backend, client.generate_batch([PROMPT] * 6, SAMPLED)).mean())
    assert means[0] < means[1]


@pytest.mark.parametrize("path", ["fast", "model"])
def test_a_load_copies_the_weights_that_changed(build, tokenizer, path):
    model = loud(build, "llama")
    client = LocalClient(model, tokenizer, path=path, autocast="bfloat16")
    before = asyncio.run(client.score(PROMPT))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.add_(0.3)
    assert asyncio.run(client.score(PROMPT)) == before
    asyncio.run(client.load(WeightRef(1)))
    assert asyncio.run(client.score(PROMPT)) == asyncio.run(
        LocalClient(model, tokenizer, path=path, autocast="bfloat16").score(PROMPT)
    )
    assert asyncio.run(client.score(PROMPT)) != before


def test_only_weights_of_linear_layers_are_copied(build):
    model = build("qwen2")  # its output layer is tied to its embedding
    copied = AutocastCopy(model, torch.bfloat16).model
    assert copied.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert copied.model.norm.weight is model.model.norm.weight
    assert copied.model.rotary_emb.inv_freq is model.model.rotary_emb.inv_freq
    for mine, theirs in ((copied, model), (copied.model.layers[0].mlp, model.model.layers[0].mlp)):
        own = mine.lm_head if mine is copied else mine.up_proj
        source = theirs.lm_head if theirs is model else theirs.up_proj
        assert own.weight.dtype == torch.bfloat16 and source.weight.dtype == torch.float32
        assert torch.equal(own.weight, source.weight.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # the second has biases in some projections
def test_copied_projections_of_one_input_are_those_of_autocast(build, name):
    layer = build(name).model.layers[0]
    for modules in (
        [layer.self_attn.q_proj, layer.self_attn.k_proj],
        [layer.mlp.gate_proj, layer.mlp.up_proj],
    ):
        together = Projections(modules, torch.bfloat16)
        together.refresh()
        x = torch.randn(3, 5, modules[0].in_features)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            expected = [module(x) for module in modules]
            for part, own in zip(together(x), expected, strict=True):
                assert part.dtype == own.dtype == torch.bfloat16
                assert torch.allclose(part.float(), own.float(), rtol=1e-2, atol=1e-3)


def test_the_copy_notices_that_modules_were_replaced(build):
    model = build("qwen3")
    copied = AutocastCopy(model, torch.bfloat16)
    assert copied.mirrors(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data)
    assert not copied.mirrors(model)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_neox"])
def test_the_reference_is_the_forward_in_float32(build, name):
    narrow = build(name).to(torch.bfloat16)
    wide = copy.deepcopy(narrow).float()
    ids = torch.tensor([PROMPT])
    with torch.inference_mode(), in_float32(narrow):
        found = narrow(ids).logits
    with torch.inference_mode():
        assert torch.allclose(found, wide(ids).logits, atol=1e-4)
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    narrow(ids).logits.sum().backward()


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])  # the second has a tied output layer
def test_a_plan_counts_the_copied_weights(build, name):
    model = build(name)
    copied = AutocastCopy(model, torch.bfloat16).model
    size = sum(2 * item.numel() for item in copied.parameters() if item.dtype == torch.bfloat16)
    load = EngineLoad(sequences=2, prompt_tokens=8, longest=16)
    planned = LocalClient.memory(shape_of(model), Precision.of("float32", "bfloat16"), {}, load)
    assert planned["weights in bfloat16"] == pytest.approx(size, rel=0.02)  # without biases
