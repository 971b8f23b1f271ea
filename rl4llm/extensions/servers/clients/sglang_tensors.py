"""Weights in SGLang's requests: buckets of tensors, from a CPU by value, from a GPU as handles that the server opens."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rl4llm.core.types import WeightRef

BUCKET_BYTES = 256 << 20
DEVICE = 6  # among the arguments of `rebuild_cuda_tensor`


def buckets(weight_ref: WeightRef) -> Iterator[tuple[list[str], list[Tensor], str | None]]:
    """Yield names and tensors of at most BUCKET_BYTES together; only the last bucket has the version, complete by then."""
    names: list[str] = []
    tensors: list[Tensor] = []
    size = 0
    assert weight_ref.tensors is not None  # true for these kinds
    for name, tensor in weight_ref.tensors():
        if tensors and size + tensor.nbytes > BUCKET_BYTES:
            yield names, tensors, None
            names, tensors, size = [], [], 0
        names.append(name)
        tensors.append(tensor)
        size += tensor.nbytes
    yield names, tensors, str(weight_ref.version)


def pickled(names: Sequence[str], tensors: Sequence[Tensor], ranks: int) -> list[str]:
    """Return a payload for each of the server's ranks. Each has its own handles, since each gives its own back."""
    pairs = [(name, _alone(tensor.detach())) for name, tensor in zip(names, tensors, strict=True)]
    if not all(tensor.is_cuda for tensor in tensors):
        return [_text(pickle.dumps([(name, tensor.cpu()) for name, tensor in pairs]))] * ranks
    return [_text(_handles(pairs)) for _ in range(ranks)]


def by_uuid(reduced: tuple[Any, tuple[Any, ...]], uuid: str) -> tuple[Any, tuple[Any, ...]]:
    """Replace the number of the device by its UUID, which SGLang looks up: the numbers of two processes may differ."""
    rebuild, arguments = reduced
    return rebuild, (*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :])


def _handles(pairs: Sequence[tuple[str, Tensor]]) -> bytes:
    def reduce(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        return by_uuid(reduce_tensor(tensor), str(torch.cuda.get_device_properties(tensor.device).uuid))

    buffer = io.BytesIO()
    pickler: Any = ForkingPickler(buffer)
    pickler.dispatch_table = {**pickler.dispatch_table, Tensor: reduce}
    pickler.dump(pairs)
    return buffer.getvalue()


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor that fills its storage, since pickle writes the whole storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
