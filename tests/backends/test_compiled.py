"""Layers through `torch.compile` give the numbers of plain ones, in the code of one compilation."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rl4llm.backends import compiled
from rl4llm.backends.lora import add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.data.aggregation import totals_of
from rl4llm.data.pack import pack
from rl4llm.runtime.ranks import Ranks

compiles_rightly = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 compiles to other numbers, so layers stay plain",
)


@pytest.fixture(autouse=True)
def fresh():
    """Forget what was compiled before."""
    torch._dynamo.reset()
    compiled._compiled.cache_clear()
    counters.clear()


def packed(trajectories, layout):
    return pack(
        trajectories, [1.0 - 0.3 * number for number in range(len(trajectories))], max_tokens_per_batch=64, layout=layout,
        aggregation="sequence", totals=totals_of(trajectories), pad_token_id=0,
    )  # fmt: skip


def losses(batch, logprobs_BT, entropy_BT):
    return -logprobs_BT * batch.credits_BT, {}


def computed(backend, batches):
    """Return log-probs without a gradient, and gradients."""
    logprobs = [backend.forward(batch) for batch in batches]
    for batch in batches:
        backend.forward_backward(batch, losses)
    grads = [parameter.grad for parameter in backend.model.parameters() if parameter.requires_grad]
    backend.model.zero_grad()
    return logprobs, grads


def backends(model, rank=0, **options):
    """Return a backend with plain layers, and one with compiled layers."""
    found = []
    for compiles in (True, False):  # the plain one must not undo what the other did to attention
        own = load_model(copy.deepcopy(model), gradient_checkpointing=options.get("checkpointing", False))
        adapter = add_adapter(own, rank=rank, seed=1) if rank else None
        autocast = options.get("autocast", "none")
        found.append(TorchBackend(own, lr=1e-3, compile_layers=compiles, adapter=adapter, autocast=autocast))
    return found[::-1]


@compiles_rightly
@pytest.mark.parametrize("options", [{}, {"checkpointing": True, "rank": 4}])
def test_compiled_layers_have_the_plain_gradients(build, trajectories, options):
    plain, backend = backends(build("qwen3"), **options)
    assert backend.info()["compiled"] and not plain.info()["compiled"] and not backend.warnings()
    graphs = []
    for layout in ("shared", "packed", "sorted"):
        batches = packed(trajectories, layout)
        torch.testing.assert_close(computed(backend, batches), computed(plain, batches), atol=1e-5, rtol=1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[2] > 0  # further batches compile nothing


def test_compiled_layers_come_close_under_autocast(build, trajectories):
    plain, backend = backends(build("llama"), autocast="bfloat16")
    assert backend.info()["compiled"]
    batches = packed(trajectories, "shared")
    (one, one_grads), (other, other_grads) = computed(backend, batches), computed(plain, batches)
    for found, expected in zip(one, other, strict=True):
        torch.testing.assert_close(found, expected, atol=0.1, rtol=0)
    for found, expected in zip(one_grads, other_grads, strict=True):
        assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99


def test_layers_stay_plain_where_they_cannot_be_compiled(build, trajectories, monkeypatch):
    def fails(*given, **options):
        raise RuntimeError("No working C++ compiler found\nin a long list of them")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    plain, backend = backends(build("llama"))
    assert not backend.info()["compiled"]
    assert backend.warnings() == ["backend.compile_layers=true has no effect: No working C++ compiler found."]
    batches = packed(trajectories, "shared")
    torch.testing.assert_close(computed(backend, batches), computed(plain, batches), atol=0, rtol=0)


def test_compiled_layers_with_other_numbers_are_refused(build, monkeypatch):
    def wrong(function, **options):
        return lambda self, x, **given: 1.1 * function(self, x, **given)

    monkeypatch.setattr(torch, "compile", wrong)
    _, backend = backends(build("llama"))
    assert "compiled layers give numbers that differ by" in backend.warnings()[0]
    assert not backend.info()["compiled"]


def test_a_model_on_padded_rows_is_not_compiled(build):
    _, backend = backends(build("gemma2"))
    assert not backend.info()["compiled"] and "has no effect" in backend.warnings()[-1]


def test_layers_stay_plain_where_several_ranks_train(build):
    class TwoRanks(Ranks):
        size = 2

    backend = TorchBackend(load_model(build("llama")), lr=1e-3)
    assert "several processes" in compiled.compile_layers(backend._module, TwoRanks())
    assert type(backend.model.model.layers[0]) is LlamaDecoderLayer
