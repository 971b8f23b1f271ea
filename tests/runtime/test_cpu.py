"""Fast kernels give the numbers and gradients of torch's own, and keep parameters and their names."""

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl4llm.runtime import cpu as kernels
from rl4llm.runtime.cpu import (
    FastLinear,
    FastRMSNorm,
    PackedLinear,
    linear,
    use_fast_linear,
    use_fast_norms,
    weight_gradient,
)

SIZES = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def either_kernel(request, monkeypatch):
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(kernels, "prefers_onednn", lambda: request.param)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (0, 6)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_and_its_gradients_are_those_of_torch(either_kernel, shape, with_bias):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    inputs = [x, weight] + ([torch.randn(5, requires_grad=True)] if with_bias else [])
    ours, theirs = linear(*inputs), nn.functional.linear(*inputs)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    scale = torch.randn_like(theirs)
    grads = torch.autograd.grad(ours.mul_(scale).sum(), inputs)  # in place, as in Gemma 3n
    for grad, wanted in zip(grads, torch.autograd.grad((theirs * scale).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [1, 8, 300])
def test_a_packed_layer_gives_the_numbers_of_a_plain_one(packed, rows, monkeypatch):
    if packed and not kernels.multiplies_bfloat16():
        pytest.skip("this processor has no bfloat16 products")
    monkeypatch.setattr(kernels, "multiplies_bfloat16", lambda: packed)
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((2, rows, 96), (80, 96), (80,)))
    for added in (None, bias):
        with torch.inference_mode():
            found, own = PackedLinear(weight, added)(x), nn.functional.linear(x, weight, added)
        assert found.shape == own.shape and found.dtype == torch.bfloat16
        torch.testing.assert_close(found, own, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_gradient_is_the_sum_of_outer_products(either_kernel, dtype):
    grad, x = torch.randn(2, 7, 5, dtype=dtype), torch.randn(2, 7, 6, dtype=dtype)
    expected = torch.einsum("btn,btd->nd", grad.double(), x.double())
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(weight_gradient(grad, x).double(), expected, atol=tolerance, rtol=tolerance)


def test_a_frozen_weight_or_input_gets_no_gradient(either_kernel):
    x, weight = torch.randn(3, 6, requires_grad=True), torch.randn(5, 6)
    linear(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_under_autocast_products_are_bf16(either_kernel):
    x, weight = torch.randn(3, 6), torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN")
def test_swapped_modules_keep_names_parameters_and_numbers(monkeypatch):
    monkeypatch.setattr(kernels, "prefers_onednn", lambda: True)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        before = model(ids).logits
    parameters = dict(model.named_parameters())
    linears = sum(type(module) is nn.Linear for module in model.modules())
    assert use_fast_norms(model) == 5  # two of the layer, two of its heads, one at the end
    assert use_fast_linear(model) == linears
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert len(list(model.parameters())) == len(parameters)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before, atol=1e-6, rtol=1e-6)
    assert use_fast_norms(model) == 0
    assert any(isinstance(module, FastLinear) for module in model.modules())
    assert any(isinstance(module, FastRMSNorm) for module in model.modules())
