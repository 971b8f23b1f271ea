"""Make a process fast on its CPU: faster kernels for matrix products and norms, and two memory settings.

For fp32 on the CPU torch calls MKL, which picks slow kernels on processors that are not Intel's. On two Zen 5 cores it
reaches about 210 GFLOP/s. oneDNN, which every torch build contains, reaches 430 to 480. bf16 uses oneDNN anyway, and GPUs
are not affected. The norms serve GPUs too.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import platform
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8  # malloc.h of glibc
KEPT = 1 << 30  # bytes of free memory at the top of the heap that stay with the process
STEP = 64 << 20
HEAP_BLOCK = 32 << 20  # larger blocks are mapped by themselves; glibc accepts no more than this


@functools.cache
def prefers_onednn() -> bool:
    """Return whether fp32 products on this CPU should use oneDNN: x86-64, not Intel, and a torch build that has it."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(errors="replace")[:4000]


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether this processor multiplies matrices in bfloat16, several times as fast as in float32."""
    find = getattr(torch.cpu, "get_capabilities", None)  # since torch 2.11
    capabilities = find() if find is not None else {}
    return (
        bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
        and torch.backends.mkldnn.is_available()
    )


class PackedLinear:
    """A linear layer without gradients, with its own weight.

    On processors with bfloat16 products the weight has the layout that oneDNN computes in. For a few rows that takes
    about two thirds of the time, to the same numbers, since each product would bring the weight into that layout.
    """

    def __init__(self, weight_ND: Tensor, bias_N: Tensor | None):
        ours = weight_ND.dtype == torch.bfloat16 and weight_ND.device.type == "cpu" and multiplies_bfloat16()
        self._packed = ours and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_ND) if self._packed else weight_ND
        self._bias = bias_N

    def __call__(self, x: Tensor) -> Tensor:
        multiply = _product if self._packed else F.linear
        return multiply(x, self._weight, self._bias)


def linear(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute `F.linear` with the fastest kernel of this machine, with gradients. x is (..., D), the result (..., N)."""
    if not _is_ours(x, weight_ND):
        return F.linear(x, weight_ND, bias_N)
    if torch.is_grad_enabled() and (x.requires_grad or weight_ND.requires_grad):
        # some models change the output in place, which autograd refuses for a view that is made inside
        return _OneDNNLinear.apply(x.reshape(-1, x.shape[-1]), weight_ND, bias_N).view(*x.shape[:-1], -1)
    return _product(x, weight_ND, bias_N)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient (N, D) of a weight from the gradients of its outputs (..., N) and from its inputs (..., D)."""
    grad_2d, x_2d = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    if not _is_ours(grad_2d, x_2d):
        return grad_2d.t() @ x_2d
    # oneDNN is slow when both operands are transposed views, so the narrower one is copied.
    if grad_2d.shape[1] <= x_2d.shape[1]:
        return _product(grad_2d.t().contiguous(), x_2d.t())
    return _product(x_2d.t().contiguous(), grad_2d.t()).t()


def _is_ours(x: Tensor, weight_ND: Tensor) -> bool:
    return (
        x.dtype == weight_ND.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0  # oneDNN refuses empty products
        and prefers_onednn()
        and not torch.is_autocast_enabled("cpu")
    )


def _product(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight_ND, bias_N, "none", [], "")


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ND: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_ND)
        ctx.has_bias = bias_N is not None
        return _product(x, weight_ND, bias_N)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_ND = ctx.saved_tensors
        grad_x = _product(grad, weight_ND.t()) if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(grad, x) if ctx.needs_input_grad[1] else None
        grad_bias = (
            grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        )
        return grad_x, grad_weight, grad_bias


class FastLinear(nn.Linear):
    """`nn.Linear` with the same parameters, through `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def use_fast_linear(model: nn.Module) -> int:
    """Give every plain `nn.Linear` of a model the fast kernel if this CPU gains from it; return how many were changed.

    Parameters and their names stay as they are.
    """
    if not prefers_onednn():
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                fast = FastLinear(1, 1, bias=False, device="meta")
                fast.in_features, fast.out_features = child.in_features, child.out_features
                fast.weight, fast.bias = child.weight, child.bias
                setattr(parent, name, fast)
                count += 1
    return count


def keep_freed_memory() -> bool:
    """Have glibc keep up to 1 GiB of freed memory in this process; return False for another malloc.

    What one micro-batch frees, the next one requests. By default glibc returns large blocks to the kernel at once, and the
    next activations fault their pages in again, zeroed one by one. That takes about a fifth of the time of an update of a
    small model on a CPU.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    # the other options hold for the first heap alone, so all threads use it
    options = ((M_MMAP_THRESHOLD, HEAP_BLOCK), (M_TRIM_THRESHOLD, KEPT), (M_TOP_PAD, STEP), (M_ARENA_MAX, 1))
    return all(mallopt(option, value) for option, value in options)


def set_aside_what_stays() -> None:
    """Exclude all objects that are alive now from garbage collection; later objects are collected as usual.

    The modules of torch and transformers alone are half a million objects, and each full collection visits all of them.
    That blocks the process for 0.2 s, about once per thousand episodes.
    """
    gc.collect()
    gc.freeze()


def rms_norm(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Divide x by the root of its mean square over the last dimension, and multiply by the weight; computed in fp32.

    Under autocast the result has autocast's dtype, so that it is not cast again for each product that uses it.
    """
    device = x.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    dtype = cast or torch.promote_types(x.dtype, weight_D.dtype)
    with torch.autocast(device, enabled=False):
        if device == "cpu":
            return _RMSNorm.apply(x, weight_D, epsilon, dtype)
        x = x.to(torch.promote_types(x.dtype, weight_D.dtype))
        return F.rms_norm(x, weight_D.shape, weight_D.to(x.dtype), epsilon).to(dtype)  # one kernel on a GPU


class _RMSNorm(torch.autograd.Function):
    """Twice as fast on a CPU as autograd through the formula, and it keeps no intermediate tensor but one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        x32 = x.float()
        scale = (
            torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(epsilon)
            .rsqrt_()
        )
        ctx.save_for_backward(x, weight_D, scale)
        return ((x32 * scale).to(x.dtype) * weight_D).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight_D, scale = ctx.saved_tensors
        grad, weight32_D, size = grad.float().contiguous(), weight_D.float(), x.shape[-1]
        normed = x.float() * scale
        product_ND = (grad * normed).reshape(-1, size)
        mean = torch.mv(product_ND, weight32_D).view(scale.shape).div_(-size)
        grad_x = (grad * weight32_D).addcmul_(normed, mean).mul_(scale)
        return grad_x.to(x.dtype), product_ND.sum(0).to(weight_D.dtype), None, None


class FastRMSNorm(nn.Module):
    """Computes the RMSNorm of the Llama family, with its parameter, through `rms_norm`."""

    def __init__(self, weight: nn.Parameter, variance_epsilon: float):
        super().__init__()
        self.weight = weight
        self.variance_epsilon = variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.variance_epsilon)


@torch.no_grad()
def use_fast_norms(model: nn.Module) -> int:
    """Replace the RMSNorms of a model that give the same numbers as `FastRMSNorm`; return how many were replaced.

    Parameters and their names stay as they are. Some architectures scale by 1 + weight or round elsewhere: a norm that
    differs on random numbers stays.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fast = _same_norm(child)
            if fast is not None:
                setattr(parent, name, fast)
                count += 1
    return count


def _same_norm(module: nn.Module) -> FastRMSNorm | None:
    epsilon = getattr(module, "variance_epsilon", None)
    parameters = dict(module.named_parameters())
    is_norm = type(module).__name__.endswith("RMSNorm") and not isinstance(module, FastRMSNorm)
    if not is_norm or list(parameters) != ["weight"] or epsilon is None:
        return None
    weight_D = parameters["weight"]
    fast = FastRMSNorm(weight_D, epsilon)
    # a GPU's kernel rounds once, the module twice
    narrow = weight_D.dtype.itemsize < 4 and weight_D.device.type != "cpu"
    rtol = 2 * torch.finfo(weight_D.dtype).eps if narrow else 1e-5
    x_ND = torch.linspace(-2, 3, 3 * len(weight_D), dtype=weight_D.dtype, device=weight_D.device).view(3, -1)
    return fast if torch.allclose(fast(x_ND), module(x_ND), rtol=rtol, atol=1e-6) else None
