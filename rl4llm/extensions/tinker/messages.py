"""Tinker's protobuf messages as tensors: what a training request brings, and what its answers are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from rl4llm.core.errors import DataError
from rl4llm.core.types import Completion
from rl4llm.extensions.tinker.protobuf import (
    Fields,
    blobs,
    entries,
    field,
    integer,
    integers,
    packed,
    parse,
    texts,
)

DTYPES = {1: torch.float32, 2: torch.int64, 3: torch.int32, 4: torch.bfloat16}
STOPPED, TOO_LONG = 0, 1
NOTHING, NO_LOGPROB = 0, -99999.0  # what stands for no token in a matrix of the likeliest ones


@dataclass(frozen=True, slots=True)
class Datum:
    """A sequence, and what a loss needs at each of its positions. The model sees `tokens` up to and with position i when it
    predicts `inputs["target_tokens"][i]`.
    """

    tokens: Tensor
    inputs: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Describes a loss to compute and, unless `forward_only`, to add its gradient."""

    data: tuple[Datum, ...]
    loss_fn: str
    options: dict[str, float | str]
    forward_only: bool


def place_of(fields: Fields) -> tuple[str, int]:
    """Return whose request a ForwardBackwardRequest is, and its number."""
    return (texts(fields, 1) or [""])[-1], integer(fields, 2)


def read_forward_backward(fields: Fields) -> ForwardBackward:
    """Return the request that these fields describe; raise DataError for what no language model can train on."""
    options = {name: value for name, value in entries(fields, 5).items() if isinstance(value, float)}
    for name, value in entries(fields, 7).items():
        if isinstance(value, dict):
            options[name] = texts(value, 2)[-1] if 2 in value else _number(value)  # type: ignore[assignment]
    return ForwardBackward(
        data=tuple(_datum(data) for data in blobs(fields, 3)),
        loss_fn=texts(fields, 4)[-1],
        options=dict(options),
        forward_only=bool(integer(fields, 6)),
    )


def _number(value: Fields) -> float:
    return float(value.get(1, [0.0])[-1])


def _datum(data: bytes) -> Datum:
    fields = parse(data)
    pieces = []
    for chunk in map(parse, blobs(fields, 1)):
        if 1 not in chunk:
            raise DataError("A model input has an image or sound. This server's models read text alone.")
        encoded = parse(blobs(chunk, 1)[-1])
        pieces.append(_buffer((blobs(encoded, 1) or [b""])[-1], torch.int32))
    tensors = {
        name: tensor_of(value) for name, value in entries(fields, 2).items() if isinstance(value, dict)
    }
    return Datum(torch.cat(pieces or [torch.zeros(0, dtype=torch.int32)]).long(), tensors)


def tensor_of(fields: Fields) -> Tensor:
    """Return the tensor of a Tensor message, whose sparse form has 0 wherever nothing is listed."""
    dtype, shape = DTYPES.get(integer(fields, 3)), integers(fields, 4)
    if dtype is None:
        raise DataError(f"A tensor has the unknown dtype {integer(fields, 3)}. Known: {sorted(DTYPES)}.")
    if 2 not in fields:
        flat = _buffer((blobs(fields, 1) or [b""])[-1], dtype)
        return flat.reshape(shape) if shape else flat
    parts = parse(blobs(fields, 2)[-1])
    values, rows, columns = ((blobs(parts, number) or [b""])[-1] for number in (1, 2, 3))
    counts = _buffer(rows, torch.int64).diff()
    places = torch.arange(shape[0]).repeat_interleave(counts), _buffer(columns, torch.int64)
    return torch.zeros(shape, dtype=dtype).index_put(places, _buffer(values, dtype))


def _buffer(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.zeros(0, dtype=dtype)


def encode_tensor(tensor: Tensor) -> bytes:
    """Return an encoded Tensor message of the dense form."""
    number = next(number for number, dtype in DTYPES.items() if dtype == tensor.dtype)
    return field(1, _bytes(tensor)) + field(3, number) + packed(4, tensor.shape)


def encode_losses(logprobs: Sequence[Tensor], metrics: dict[str, float]) -> bytes:
    """Return an encoded ForwardBackwardOutput: the log-probs of each datum, and the metrics.

    A record holds data whose tensors differ in length alone, so a run with another number of targets begins a new one.
    """
    body = field(1, "TokenLogprobs")
    for trailing, run in groupby(logprobs, lambda tensor: tensor.shape[1:]):
        tensors = list(run)
        ends = torch.tensor([0, *(tensor.numel() * 4 for tensor in tensors)]).cumsum(0)
        batched = field(1, b"".join(map(_bytes, tensors))) + field(2, _bytes(ends)) + field(3, 1)
        batched += packed(4, trailing) if trailing else b""
        entry = field(1, "logprobs") + field(2, batched)
        body += field(2, field(1, "TokenLogprobs") + field(2, entry) + field(3, len(tensors)))
    return body + b"".join(
        field(3, field(1, name) + field(2, float(value))) for name, value in metrics.items()
    )


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The log-probs of a prompt's tokens (N), the likeliest tokens at each place with theirs (N, K), and those of tokens
    that were asked for (N - 1, K); NaN without one.
    """

    logprobs_N: Tensor | None = None
    likely: tuple[Tensor, Tensor] | None = None
    targets: Tensor | None = None


def encode_samples(
    completions: Sequence[Completion],
    likely: Sequence[tuple[Tensor, Tensor] | None],
    prompt: PromptScores,
) -> bytes:
    """Return an encoded SampleResponse; `likely` are the likeliest tokens at each place of a completion, with log-probs."""
    body = b""
    for completion, top in zip(completions, likely, strict=True):
        sequence = field(1, STOPPED if completion.finish_reason == "stop" else TOO_LONG)
        sequence += field(2, _bytes(torch.tensor(completion.token_ids, dtype=torch.int32)))
        sequence += field(3, _bytes(torch.tensor(completion.logprobs, dtype=torch.float32)))
        body += field(1, sequence + (field(4, _encode_likely(*top)) if top is not None else b""))
    if prompt.logprobs_N is not None:
        body += field(2, _bytes(prompt.logprobs_N.float()))
    if prompt.likely is not None:
        body += field(3, _encode_likely(*prompt.likely))
    if prompt.targets is not None:
        body += field(5, encode_tensor(prompt.targets.float()))
    return body


def _encode_likely(tokens_NK: Tensor, logprobs_NK: Tensor) -> bytes:
    length, count = tokens_NK.shape
    data = field(1, _bytes(tokens_NK.int())) + field(2, _bytes(logprobs_NK.float()))
    return data + field(3, count) + field(4, length)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
