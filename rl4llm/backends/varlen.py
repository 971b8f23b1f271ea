"""Attention of all segments of a row in one call: each has its own queries, and the keys of its prefix before its own.

Flash attention takes tokens in rows (N, heads, width) and the ends of each segment, so nothing is padded and no mask is
stored. torch has it as `varlen_attn`, for 16-bit numbers on GPUs. It is used where it gives the numbers and gradients of
`plain_varlen`.

The keys of a prefix are copied once for each segment behind it. `varlen_attn` of torch 2.13 cannot train without the copy:
its block tables are for inference only, and it drops the gradient of the log-sum-exp by which two calls could be merged.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TOLERANCE = 0.03
"""Accepted difference from `plain_varlen`, relative to the largest number compared; bf16 rounds to 0.004."""

Ints = NDArray[np.int64]
Kernel = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Spans:
    """Segment s of a row has the queries ends_q[s] to ends_q[s + 1], which are the last of its keys.

    Its keys are the places keys_M[ends_k[s]:ends_k[s + 1]] of the row. The longest segment has `longest_q` and `longest_k`.
    """

    kernel: Kernel
    keys_M: Tensor
    ends_q: Tensor
    ends_k: Tensor
    longest_q: int
    longest_k: int

    @classmethod
    def of(cls, kernel: Kernel, lengths: Ints, parents: Ints, device: torch.device) -> Spans:
        """Return the spans of segments that follow each other; `parents` are those that they continue, -1: none."""
        keys: list[Ints] = []  # of each segment
        for start, length, parent in zip(np.cumsum(lengths) - lengths, lengths, parents, strict=True):
            own = np.arange(start, start + length)
            keys.append(np.concatenate([keys[parent], own]) if parent >= 0 else own)
        totals = np.array([len(places) for places in keys])

        def placed(numbers: Ints, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(numbers).to(device, dtype, non_blocking=True)

        return cls(
            kernel,
            placed(np.concatenate(keys), torch.int64),
            placed(np.r_[0, np.cumsum(lengths)], torch.int32),
            placed(np.r_[0, np.cumsum(totals)], torch.int32),
            int(lengths.max()),
            int(totals.max()),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """Return the attention output (N, H, D) of queries (N, H, D); keys and values (N, K, D) may have fewer heads."""
        k, v = (_Gather.apply(x, self.keys_M) for x in (k, v))
        past = -1 if window is None or window >= self.longest_k else window - 1
        ends = (self.ends_q, self.ends_k, self.longest_q, self.longest_k)
        return self.kernel(q.contiguous(), k, v, *ends, scale=scaling, window_size=(past, 0))


class _Gather(torch.autograd.Function):
    """Rows by index. A prefix's row is taken once for each segment behind it, so its gradients are added up in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places_M: Tensor) -> Tensor:
        ctx.save_for_backward(places_M)
        ctx.rows = len(x)
        return x.index_select(0, places_M)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places_M,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.rows, *grad.shape[1:], dtype=torch.float32)
        return total.index_add_(0, places_M, grad.float()).to(grad.dtype), None


def plain_varlen(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, longest_q: int, longest_k: int,
    *, scale: float, window_size: tuple[int, int] = (-1, 0),
) -> Tensor:  # fmt: skip
    """Compute what `torch.nn.attention.varlen.varlen_attn` computes, one segment at a time and with masks."""
    groups, outs = q.shape[1] // k.shape[1], []
    (begin_q, *ends_of_q), (begin_k, *ends_of_k) = ends_q.tolist(), ends_k.tolist()
    for end_q, end_k in zip(ends_of_q, ends_of_k, strict=True):
        length, total = end_q - begin_q, end_k - begin_k
        own_k, own_v = (x[begin_k:end_k].repeat_interleave(groups, dim=1) for x in (k, v))
        seen = torch.ones(length, total, dtype=torch.bool, device=q.device).tril(total - length)
        if window_size[0] >= 0:
            seen = seen.triu(total - length - window_size[0])
        scores = torch.einsum("qhd,khd->hqk", q[begin_q:end_q] * scale, own_k)
        probs = scores.float().masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype)
        outs.append(torch.einsum("hqk,khd->qhd", probs, own_v))
        begin_q, begin_k = end_q, end_k
    return torch.cat(outs)


@functools.cache
def kernel_for(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> Kernel | None:
    """Return the kernel for these sizes, or None: on a CPU, in fp32, and with a warning where torch has no right one."""
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        kernel = _varlen_attn()
        differs = _difference(kernel, device, dtype, heads, kv_heads, width)
        problem = f"it differs by {differs:.2g} from plain attention" if not differs <= TOLERANCE else ""
    except torch.OutOfMemoryError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    if problem:
        warnings.warn(f"Attention runs block by block, without torch's varlen_attn: {problem}", stacklevel=2)
        return None
    return kernel


def _varlen_attn() -> Kernel:
    """Return torch's kernel, which takes fewer heads of keys than of queries; newer versions want to be asked for it."""
    from torch.nn.attention import varlen  # noqa: PLC0415 - not in every torch that is supported

    kernel: Any = varlen.varlen_attn
    asks = "enable_gqa" in inspect.signature(kernel).parameters  # torch 2.11 has no such parameter
    return functools.partial(kernel, enable_gqa=True) if asks else kernel


def _difference(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> float:
    """Return the largest relative difference of outputs and gradients from `plain_varlen`, with a window and without."""
    lengths, parents = np.array([9, 5, 70, 3, 4]), np.array([-1, -1, 0, 0, 3])
    generator = torch.Generator().manual_seed(0)
    random = [
        torch.randn(int(lengths.sum()), count, width, generator=generator).to(device, dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    ]
    worst = 0.0
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for window in (None, 6):
            results = []
            for each in (kernel, plain_varlen):
                q, k, v = (x.clone().requires_grad_() for x in random[:3])
                out = Spans.of(each, lengths, parents, device).attend(q, k, v, width**-0.5, window)
                results.append([out.detach(), *torch.autograd.grad((out * random[3]).sum(), (q, k, v))])
            for output, expected in zip(*results, strict=True):
                worst = max(worst, float((output - expected).abs().max() / expected.abs().max()))
    return worst
