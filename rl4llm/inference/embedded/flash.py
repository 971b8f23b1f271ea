"""What a captured decoding step is made of on a GPU: attention that ends at each row's length, and fused elementwise work.

Elsewhere the plain functions are used, which compute the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rl4llm.inference.embedded.llama_decode import Norm, rotated
from rl4llm.runtime.devices import has_graphs

Flash = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], int, Tensor, float], Tensor]
TOLERANCE = 0.03
"""Accepted difference from attention with a mask, relative to the largest number compared; bf16 rounds to 0.004."""


def rotate(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, query_norm: Norm | None, key_norm: Norm | None
) -> Tensor:  # fmt: skip
    """Return the heads of queries, keys and values (B, n * D) as one tensor (B, heads, D), normalised and rotated."""
    query, key, value = (x.unflatten(-1, (-1, cos.shape[-1])) for x in (query, key, value))
    query = query if query_norm is None else query_norm(query)
    key = key if key_norm is None else key_norm(key)
    return torch.cat(
        [rotated(query, cos, sin).to(value.dtype), rotated(key, cos, sin).to(value.dtype), value], 1
    )


def add_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x + y, and its norm in the dtype of y."""
    x = x + y
    return x, Norm(weight, epsilon)(x).to(y.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return F.silu(gate) * up


class Fused(NamedTuple):
    """The work between the matrix products of a decoder layer."""

    rotate: Callable[..., Tensor]
    add_norm: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., Tensor]
    compiled: bool = False


PLAIN = Fused(rotate, add_norm, gated)


@functools.cache
def compiled() -> Fused:
    """Return the functions compiled for any number of rows, each as one or two kernels that round as the plain ones do."""
    options: dict[str, Any] = {"emulate_precision_casts": True}

    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=True, options=options)

    return Fused(fuse(rotate), fuse(add_norm), fuse(gated), compiled=True)


def flash_attention(
    query_BHD: Tensor,
    slab_N2KD: Tensor,
    begins: tuple[Tensor, Tensor],
    capacity: int,
    lengths_B: Tensor,
    scaling: float,
) -> Tensor:
    """Attend from one query per row to the first `lengths_B` positions of its row of a slab; returns (B, H, D).

    `slab_N2KD` is that of `TokenCache.flat`. `begins` says where the query and the keys of each row begin, in int32: from 0
    to B times 1, and times the capacity.
    """
    keys, values = slab_N2KD.chunk(2, dim=1)
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query_BHD, keys, values, *begins, 1, capacity, 0.0, False, False,
        scale=scaling, seqused_k=lengths_B,
    )[0]  # fmt: skip
    return output


@functools.cache
def flash_for(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> tuple[Flash | None, str]:
    """Return the kernel for these sizes if torch has it and it is right, else None and the reason."""
    if not has_graphs(device) or dtype not in (torch.bfloat16, torch.float16):
        return None, f"attention with masks, since it computes in {dtype} on {device.type}"
    try:
        differs = _difference(flash_attention, device, dtype, heads, kv_heads, width)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return None, f"attention with masks, since torch has no kernel for it: {str(error)[:200]}"
    if not differs <= TOLERANCE:
        return None, f"attention with masks, since torch's kernel differs by {differs:.2g}"
    return flash_attention, "attention up to each row's length"


def _difference(
    kernel: Flash, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> float:
    """Return the largest relative difference from attention with a mask, for rows of unequal length in a larger cache."""
    rows, capacity = 3, 192
    generator = torch.Generator().manual_seed(0)
    query, slab = (
        torch.randn(*size, width, generator=generator).to(device, dtype)
        for size in ((rows, heads), ((rows + 1) * capacity, 2 * kv_heads))
    )
    queries = torch.arange(rows + 1, dtype=torch.int32, device=device)
    begins = queries, queries * capacity
    lengths = torch.tensor([1, 100, capacity], dtype=torch.int32, device=device)
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        output = kernel(query, slab, begins, capacity, lengths, width**-0.5).float()
        keys, values = (
            x.unflatten(0, (-1, capacity))[:rows].transpose(1, 2) for x in slab.float().chunk(2, 1)
        )
        mask = (torch.arange(capacity, device=device) < lengths[:, None])[:, None, None]
        expected = F.scaled_dot_product_attention(
            query.float()[:, :, None], keys, values, mask, scale=width**-0.5, enable_gqa=True
        )[:, :, 0]
    return float((output - expected).abs().max() / expected.abs().max())
