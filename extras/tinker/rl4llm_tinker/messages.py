"""Tinker's protobuf messages as tensors: what a training request brings, and what its answers are made of.

`messages.proto` describes them, and names the command that compiles it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.message import DecodeError
from torch import Tensor

from rl4llm.core.errors import DataError
from rl4llm.core.types import Completion
from rl4llm_tinker.requests import LONGEST_DATA, MOST_DATA, MOST_TARGETS

COMPILED = Path(__file__).with_name("messages.binpb")
MESSAGES: dict[str, Any] = message_factory.GetMessages(
    descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes()).file
)
DTYPES = {1: torch.float32, 2: torch.int64, 3: torch.int32, 4: torch.bfloat16}
STOPPED, TOO_LONG = 0, 1
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
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


def message(name: str, **fields: Any) -> Any:
    """Return a message of `messages.proto`."""
    return MESSAGES[f"rl4llm.tinker.v1.{name}"](**fields)


def parse(data: bytes) -> Any:
    """Return the training request in these bytes; raise DataError if they are not a message."""
    request = message("Request")
    try:
        request.ParseFromString(data)
    except DecodeError:
        raise DataError("The body of the request is not a whole protobuf message.") from None
    return request


def read_forward_backward(request: Any) -> ForwardBackward:
    """Return what a request asks for; raise DataError for what no language model can train on."""
    if len(request.data) > MOST_DATA:
        raise DataError(f"The request has {len(request.data):,} data. Accepted: at most {MOST_DATA:,}.")
    tensors = (tensor for datum in request.data for tensor in datum.inputs.values())
    if (count := sum(abs(math.prod(tensor.shape)) for tensor in tensors)) > LONGEST_DATA // 4:
        raise DataError(
            f"The request's tensors have {count:,} numbers. Accepted: at most {LONGEST_DATA // 4:,}."
        )
    options: dict[str, float | str] = dict(request.numbers)
    options |= {
        name: getattr(value, value.WhichOneof("value") or "number") for name, value in request.options.items()
    }
    return ForwardBackward(
        data=tuple(map(_datum, request.data)),
        loss_fn=request.loss_fn,
        options=options,
        forward_only=request.forward_only,
    )


def _datum(datum: Any) -> Datum:
    if not all(chunk.HasField("text") for chunk in datum.chunks):
        raise DataError("A model input has an image or sound. This server's models read text alone.")
    tokens = _buffer(b"".join(chunk.text.tokens for chunk in datum.chunks), torch.int32).long()
    return Datum(
        tokens, {name: tensor_of(name, tensor, len(tokens)) for name, tensor in datum.inputs.items()}
    )


def tensor_of(name: str, tensor: Any, places: int) -> Tensor:
    """Return the tensor of a Tensor message, with one number or up to `MOST_TARGETS` for each place.

    The sparse form has 0 wherever nothing is listed. Raises DataError unless all numbers fit the shape.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise DataError(f"A tensor has the unknown dtype {tensor.dtype}. Known: {sorted(DTYPES)}.")
    sparse, compressed = tensor.sparse, tensor.HasField("sparse")
    numbers = _buffer(sparse.values if compressed else tensor.dense, dtype)
    shape = tuple(tensor.shape) or (len(numbers),)
    try:
        if shape[0] != places or len(shape) > 2 or not all(1 <= size <= MOST_TARGETS for size in shape[1:]):
            raise ValueError
        if not compressed:
            return numbers.reshape(shape)
        ends, columns = _buffer(sparse.rows, torch.int64), _buffer(sparse.columns, torch.int64)
        return torch.sparse_csr_tensor(ends, columns, numbers, shape, check_invariants=True).to_dense()
    except (ValueError, RuntimeError):
        raise DataError(
            f"{name} has the shape {list(shape)} and {len(numbers)} numbers beside {places} input tokens. Accepted: one "
            f"number for each token, or 1 to {MOST_TARGETS} of them, dense or as compressed sparse rows."
        ) from None


def _buffer(data: bytes, dtype: torch.dtype) -> Tensor:
    if len(data) % dtype.itemsize:
        raise DataError(f"A tensor has {len(data)} bytes, which are no whole numbers of {dtype}.")
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.zeros(0, dtype=dtype)


def encode_losses(logprobs: Sequence[Tensor], metrics: dict[str, float]) -> bytes:
    """Return an encoded answer to a training request: the log-probs of each datum, and the metrics.

    A record holds data whose tensors differ in length alone, so a run with another number of targets begins a new one.
    """
    losses = message("Losses", kind="TokenLogprobs", metrics=metrics)
    for trailing, run in groupby(logprobs, lambda tensor: tensor.shape[1:]):
        tensors = list(run)
        ends = torch.tensor([0, *(tensor.numel() * 4 for tensor in tensors)]).cumsum(0)
        data = b"".join(map(_bytes, tensors))
        batched = message("Batched", data=data, ends=_bytes(ends), dtype=1, trailing_shape=trailing)
        losses.records.add(kind="TokenLogprobs", tensors={"logprobs": batched}, count=len(tensors))
    encoded: bytes = losses.SerializeToString()
    return encoded


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
    """Return an encoded answer to `asample`; `likely` are the likeliest tokens at each place of a completion."""
    samples = message("Samples")
    for completion, top in zip(completions, likely, strict=True):
        samples.sequences.add(
            stop_reason=STOPPED if completion.finish_reason == "stop" else TOO_LONG,
            tokens=_bytes(torch.tensor(completion.token_ids, dtype=torch.int32)),
            logprobs=_bytes(torch.tensor(completion.logprobs, dtype=torch.float32)),
            likely=None if top is None else _likely(*top),
        )
    if prompt.logprobs_N is not None:
        samples.prompt_logprobs = _bytes(prompt.logprobs_N.float())
    if prompt.likely is not None:
        samples.prompt_likely.CopyFrom(_likely(*prompt.likely))
    if prompt.targets is not None:
        targets = prompt.targets.float()
        samples.targets.CopyFrom(message("Tensor", dense=_bytes(targets), dtype=1, shape=targets.shape))
    encoded: bytes = samples.SerializeToString()
    return encoded


def _likely(tokens_NK: Tensor, logprobs_NK: Tensor) -> Any:
    length, count = tokens_NK.shape
    numbers = {"tokens": _bytes(tokens_NK.int()), "logprobs": _bytes(logprobs_NK.float())}
    return message("Likely", **numbers, count=count, length=length)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
