"""The order in which a model computes the tokens of a batch, and how they attend to each other.

A `Stream` is one row of all the tokens that matter: no padding, shared prefixes once, nothing after the last token of the
policy. The trajectories of a batch are tries, and a segment of the stream is a node that attends to itself and its
ancestors. Linear layers and norms see one long row; only attention needs to know where segments begin, and it receives
the stream through transformers' attention interface. `PlainRows` is the form that every architecture understands: one
trajectory per row, padded on the right, prefixes repeated.

Both map each token of the batch to its hidden state, so the same batch gives the same numbers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from rl4llm.core.errors import ModelError
from rl4llm.core.registry import load
from rl4llm.core.types import TrainBatch

if TYPE_CHECKING:
    from rl4llm.backends.varlen import Kernel, Spans

STREAM_ATTENTION = "rl4llm_stream"
"""Name of the attention in transformers' registry; without a stream it is transformers' own SDPA."""

STREAM_EAGER = "rl4llm_stream_eager"
"""The same for architectures that SDPA cannot compute; without a stream it is the model's own function."""

SIMILAR = 0.75
"""Segments at least this share of the longest of their block are padded to it, for attention only."""

EAGER_SCORES = 1 << 25
"""Attention of bf16 on the CPU is computed without SDPA, whose backward pass is several times slower there, as long as
the scores of a block are at most this many."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """`count` segments of up to `length` tokens that attend to themselves, causally, and to the same segments before them.

    `path` lists those, from the root on: the index of each among the stream's segments, and its length.
    """

    count: int
    length: int
    path: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Stream:
    """One row of N tokens in an order in which each block is contiguous, and comes after what it attends to.

    `place_BT` is the index of each token of the batch in the row, -1 for those that are not computed. `pad_M` spreads the
    row over the blocks with their padding and `unpad_N` gathers it again; None when no block has any. With `spans`, all
    blocks are one call. `axes_A1N` and `feature_ids_1N` are those of a batch with images.
    """

    token_ids_1N: Tensor
    position_ids_1N: Tensor
    place_BT: Tensor
    blocks: tuple[Block, ...]
    pad_M: Tensor | None
    unpad_N: Tensor | None
    spans: Spans | None = None
    axes_A1N: Tensor | None = None
    feature_ids_1N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Trajectories as rows; `place_BT` is the index of each token of the batch in the flattened rows."""

    token_ids_RT: Tensor
    position_ids_RT: Tensor
    attention_mask_RT: Tensor
    place_BT: Tensor
    axes_ART: Tensor | None = None
    feature_ids_RT: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Segments:
    """Runs of tokens that are computed. `starts` are flat positions, `parents` the segment that each continues, -1: none.

    `computed` (B T,) has the flat position of the token that is computed for each.
    """

    starts: Ints
    lengths: Ints
    parents: Ints
    computed: Ints
    token_ids: Tensor
    position_ids: Tensor
    shape: torch.Size
    axes: Tensor | None
    feature_ids: Tensor | None

    def flat(self, chosen: Ints) -> Ints:
        """Flat positions of all tokens of the chosen segments, in that order."""
        lengths = self.lengths[chosen]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.repeat(self.starts[chosen], lengths) + within

    def placed(self, flat: Ints, places: Ints) -> Tensor:
        """Return `place_BT`, given the places of the computed tokens at the positions `flat`."""
        place = np.full(len(self.computed), -1)
        place[flat] = places
        place_N = torch.from_numpy(place[self.computed])
        return place_N.to(self.token_ids.device, non_blocking=True).view(self.shape)


def stream_of(batch: TrainBatch, kernel: Kernel | None = None) -> Stream:
    """Return the stream of a batch that has at least one policy token; `kernel` computes all its blocks in one call."""
    segments = _segments(batch)
    order, blocks = _blocks(segments)
    flat = segments.flat(order)
    device = batch.token_ids_BT.device
    chosen = torch.from_numpy(flat).to(device, non_blocking=True)
    pad, unpad = _padding(segments.lengths[order], blocks)
    spans = None
    if kernel is not None:
        rank = np.append(np.argsort(order), -1)  # the entry at the end answers for parent -1
        spans = load("rl4llm.backends.varlen:Spans").of(
            kernel, segments.lengths[order], rank[segments.parents[order]], device
        )
    return Stream(
        segments.token_ids[chosen][None],
        segments.position_ids[chosen][None],
        segments.placed(flat, np.arange(len(flat))),
        tuple(blocks),
        None if pad is None else torch.from_numpy(pad).to(device, non_blocking=True),
        None if unpad is None else torch.from_numpy(unpad).to(device, non_blocking=True),
        spans,
        None if segments.axes is None else segments.axes[chosen].T[:, None],
        None if segments.feature_ids is None else segments.feature_ids[chosen][None],
    )


def rows_of(batch: TrainBatch, pad_token_id: int = 0) -> PlainRows:
    """Return the rows of a batch that has at least one policy token."""
    segments = _segments(batch)
    leaves = np.setdiff1d(np.arange(len(segments.starts)), segments.parents)
    paths = _paths(segments.parents)
    rows = [segments.flat(np.array([*paths[leaf], leaf])) for leaf in leaves]
    width, device = max(map(len, rows)), batch.token_ids_BT.device
    source = np.full((len(rows), width), -1)
    for number, row in enumerate(rows):
        source[number, : len(row)] = row
    source_RT = torch.from_numpy(source).to(device, non_blocking=True)
    real_RT = source_RT >= 0
    return PlainRows(
        torch.where(real_RT, segments.token_ids[source_RT], pad_token_id),
        torch.where(real_RT, segments.position_ids[source_RT], 0),
        real_RT.long(),
        segments.placed(
            source[source >= 0], np.flatnonzero(source >= 0)
        ),  # of repeated tokens any copy will do
        None
        if segments.axes is None
        else torch.where(real_RT[..., None], segments.axes[source_RT], 0).permute(2, 0, 1),
        None if segments.feature_ids is None else torch.where(real_RT, segments.feature_ids[source_RT], -1),
    )


def stream_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    stream: Stream | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention output (1, N, H, D) of a stream's queries (1, H, N, D); keys and values may have fewer heads.

    `s_aux` are attention sinks (H,). Raise ModelError for variants that it does not compute: dropout, capped scores,
    position biases.
    """
    if stream is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, sliding_window=sliding_window,
            **options,
        )  # fmt: skip
    unknown = [name for name in ("softcap", "position_bias") if options.get(name) is not None]
    if dropout or unknown:
        what = ", ".join(unknown) or f"dropout {dropout}"
        raise ModelError(f"{type(module).__name__} uses {what}, which stream attention does not support.")
    dtype = (
        torch.get_autocast_dtype(query.device.type)
        if torch.is_autocast_enabled(query.device.type)
        else value.dtype
    )
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    scaling = scaling or q.shape[-1] ** -0.5
    if stream.spans is not None and s_aux is None and q.shape[-1] == v.shape[-1]:
        with torch.autocast(query.device.type, enabled=False):
            return stream.spans.attend(q, k, v, scaling, sliding_window)[None], None
    if stream.pad_M is not None:
        q, k, v = (_Pad.apply(x, stream.pad_M, stream.unpad_N) for x in (q, k, v))
    with torch.autocast(query.device.type, enabled=False):
        out = _attend_blocks(q, k, v, stream.blocks, scaling, sliding_window, s_aux)
    return (out if stream.unpad_N is None else out.index_select(0, stream.unpad_N))[None], None


def stream_or_eager_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    stream: Stream | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return what `stream_attention` returns; without a stream, what the model's own module computes."""
    if stream is not None:
        return stream_attention(module, query, key, value, attention_mask, stream=stream, **options)
    plain: Any = sys.modules[type(module).__module__]
    return plain.eager_attention_forward(module, query, key, value, attention_mask, **options)


def register() -> None:
    """Register the attention with transformers; a second call has no effect."""
    if STREAM_ATTENTION in AttentionInterface().valid_keys():
        return
    AttentionInterface.register(STREAM_ATTENTION, stream_attention)
    AttentionMaskInterface.register(STREAM_ATTENTION, sdpa_mask)
    AttentionInterface.register(STREAM_EAGER, stream_or_eager_attention)
    AttentionMaskInterface.register(STREAM_EAGER, eager_mask)


class _Pad(torch.autograd.Function):
    """Rows by index. Padding repeats some row, but nothing looks at it, so its gradient is 0 and need not be added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pad_M: Tensor, unpad_N: Tensor) -> Tensor:
        ctx.save_for_backward(unpad_N)
        return x.index_select(0, pad_M)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (unpad_N,) = ctx.saved_tensors
        return grad.index_select(0, unpad_N), None, None


def _attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: tuple[Block, ...],
    scaling: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    sizes = [block.count * block.length for block in blocks]
    outs: list[Tensor] = []
    keys: list[Tensor] = []  # of each segment
    values: list[Tensor] = []
    for block, *parts in zip(blocks, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        q_b, k_b, v_b = (part.unflatten(0, (block.count, block.length)) for part in parts)
        keys.extend(k_b.unbind(0))
        values.extend(v_b.unbind(0))
        k_b, v_b = _after(block.path, keys, k_b), _after(block.path, values, v_b)
        out = _attend(q_b.transpose(1, 2), k_b.transpose(1, 2), v_b.transpose(1, 2), scaling, window, sinks)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


def _after(path: tuple[tuple[int, int], ...], segments: list[Tensor], own: Tensor) -> Tensor:
    """Return the rows of a block behind those of the segments before it, which all of the block share."""
    before = [segments[number][:length].expand(len(own), -1, -1, -1) for number, length in path]
    return torch.cat([*before, own], dim=1) if before else own


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Return the attention output (n, H, L, W) of queries at the last L of the keys' (n, K, P + L, W) positions."""
    (count, heads, length, width), total = q.shape, k.shape[2]
    few = count * heads * length * total <= EAGER_SCORES
    eager = sinks is not None or (few and q.dtype == torch.bfloat16 and q.device.type == "cpu")
    if length == total and (window is None or total <= window) and not eager:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    seen = torch.ones(length, total, dtype=torch.bool, device=q.device).tril(total - length)
    if window is not None:
        seen = seen.triu(total - length - window + 1)
    mask = torch.zeros(length, total, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))
    if eager:
        groups = heads // k.shape[1]
        folded = (q * scaling).reshape(count, k.shape[1], groups * length, width)
        scores = folded @ k.transpose(2, 3) + mask.repeat(groups, 1)
        if sinks is not None:  # one more key for each head, without a value
            sink = sinks.to(q.dtype).repeat_interleave(length).view(k.shape[1], groups * length, 1)
            scores = torch.cat([scores, sink.expand(count, *sink.shape)], dim=-1)
        probs = torch.softmax(scores, dim=-1)[..., :total]
        return (probs @ v).reshape(count, heads, length, width)
    if q.device.type != "cpu":  # kernels for masks want as many heads on both sides
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)


def _segments(batch: TrainBatch) -> _Segments:
    """Return the segments that are needed, cut after the last token that precedes one of the policy's."""
    host = batch.host or batch
    segment = host.segment_ids_BT.cpu().numpy()
    columns, here = segment.shape[1], np.arange(segment.size)
    begins = np.diff(segment, prepend=-1, axis=1).reshape(-1) != 0
    computed = here
    if host.computed_BT is not None:
        computed = here - here % columns + host.computed_BT.cpu().numpy().reshape(-1)
    is_own = (computed == here) & (segment.reshape(-1) > 0)
    before = np.where(begins, -1, computed[here - 1])  # the token before each, where it is computed
    opens = is_own & (begins | (before != here - 1))
    # A segment ends where another trajectory leaves it, so that recurrent layers have a state there.
    behind = before[opens & (before >= 0)] + 1
    opens[behind] |= is_own[behind] & ~begins[behind]
    starts, number = np.flatnonzero(opens), np.cumsum(opens) - 1
    whole = np.bincount(number[is_own], minlength=len(starts))
    parents = np.where(before[starts] >= 0, number[before[starts]], -1)
    # A token's log-prob comes from the state before it, and no state looks ahead: from the last token of the policy on,
    # nothing of a segment matters. One that others continue is whole.
    states = before[host.mask_BT.cpu().numpy().reshape(-1) & (before >= 0)]
    lengths = np.zeros(len(starts), np.int64)
    np.maximum.at(lengths, number[states], states - starts[number[states]] + 1)
    for child in reversed(range(len(starts))):
        if lengths[child] and parents[child] >= 0:
            lengths[parents[child]] = whole[parents[child]]
    needed = np.flatnonzero(lengths)
    renumbered = np.full(len(starts) + 1, -1)  # the entry at the end answers for parent -1
    renumbered[needed] = np.arange(len(needed))
    return _Segments(
        starts[needed],
        lengths[needed],
        renumbered[parents[needed]],
        np.where(segment.reshape(-1) > 0, computed, here),
        batch.token_ids_BT.flatten(),
        batch.position_ids_BT.flatten(),
        batch.token_ids_BT.shape,
        None if batch.axes_BTA is None else batch.axes_BTA.flatten(0, 1),
        None if batch.feature_ids_BT is None else batch.feature_ids_BT.flatten(),
    )


def _paths(parents: Ints) -> list[tuple[int, ...]]:
    """Return the segments before each, from its root on."""
    paths: list[tuple[int, ...]] = []
    for parent in parents.tolist():  # which comes before what continues it
        paths.append((*paths[parent], parent) if parent >= 0 else ())
    return paths


def _blocks(segments: _Segments) -> tuple[Ints, list[Block]]:
    """Return the order of the segments in the stream, roots first, and the blocks that they form."""
    parents, lengths, paths = segments.parents, segments.lengths, _paths(segments.parents)
    # Those that continue the same are neighbours, the longest first. Similar ones are padded to one block, since a call of
    # the kernel for each of them takes longer than the padding; unlike ones are not, since attention grows with the square.
    order = np.lexsort((-lengths, parents, np.array([len(path) for path in paths])))
    place = np.argsort(order)
    blocks: list[Block] = []
    owner = None
    for segment in order:
        parent, length = int(parents[segment]), int(lengths[segment])
        if owner == parent and length >= SIMILAR * blocks[-1].length:
            blocks[-1] = replace(blocks[-1], count=blocks[-1].count + 1)
        else:
            path = tuple((int(place[other]), int(lengths[other])) for other in paths[segment])
            blocks.append(Block(1, length, path))
            owner = parent
    return order, blocks


def _padding(lengths: Ints, blocks: list[Block]) -> tuple[Ints | None, Ints | None]:
    """`pad` (M,): the stream's index at each place of the padded blocks; `unpad` (N,): the place of each of its tokens."""
    widths = np.repeat([block.length for block in blocks], [block.count for block in blocks])
    if (widths == lengths).all():
        return None, None
    begins, places = np.cumsum(lengths) - lengths, np.cumsum(widths) - widths
    within = np.arange(int(lengths.sum())) - np.repeat(begins, lengths)
    unpad = np.repeat(places, lengths) + within
    pad = np.zeros(int(widths.sum()), np.int64)
    pad[unpad] = np.arange(len(unpad))
    return pad, unpad
