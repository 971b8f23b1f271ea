"""Norms give the numbers and gradients of the formula, and replace only those that do."""

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM

from rl4llm.runtime.cpu import rms_norm, use_fast_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_the_formula_and_so_is_its_gradient(dtype):
    x = (3 * torch.randn(2, 5, 16)).to(dtype).requires_grad_()
    weight = torch.rand(16, requires_grad=True)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = exact[0] * (exact[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt() * exact[1]
    out = rms_norm(x, weight, 1e-5)
    tolerance = 2e-6 if dtype == torch.float32 else 0.04
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)
    scale = torch.randn_like(expected)
    grads = torch.autograd.grad((out.double() * scale).sum(), (x, weight))
    for grad, wanted in zip(grads, torch.autograd.grad((expected * scale).sum(), exact), strict=True):
        torch.testing.assert_close(
            grad.double(), wanted, atol=tolerance * 5, rtol=0.01 if dtype != torch.float32 else 1e-5
        )


def test_a_norms_gradient_does_not_depend_on_memory_order():
    x = torch.randn(4, 3, 8).transpose(0, 1).requires_grad_()
    weight = torch.rand(8, requires_grad=True)
    straight = x.detach().contiguous().requires_grad_()
    scale = torch.randn(4, 3, 8).transpose(0, 1)
    one = torch.autograd.grad((rms_norm(x, weight, 1e-5) * scale).sum(), (x, weight))
    other = torch.autograd.grad(
        (rms_norm(straight, weight, 1e-5) * scale.contiguous()).sum(), (straight, weight)
    )
    for grad, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-6, rtol=0)


def test_a_norm_with_another_formula_stays():
    model = GemmaForCausalLM(
        GemmaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, vocab_size=31)
    )  # scales by 1 + weight
    assert use_fast_norms(model) == 0
