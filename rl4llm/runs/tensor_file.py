"""Safetensors files written and read one tensor at a time, hashed on the way, so that no second pass reads them again.

The library writes a file from tensors that are all in memory at once. The format is an 8-byte length, a JSON header with
each tensor's dtype, shape and place, and the tensors' bytes in that order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from rl4llm.core.errors import WeightsError
from rl4llm.core.weights import TensorSpec

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ALIGNMENT = 8  # of the first tensor, so that readers can map them
FLUSH_BYTES = 32 << 20
PINNED_BYTES = 64 << 20


def write_tensors(path: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Write `tensors`, which are those of `specs` in their order, holding one at a time; returns the file's xxh3_64.

    What is written goes to the disk while the next tensors are made, so that there is little left to wait for at the end,
    and is hashed beside. Raises OSError.
    """
    digest = xxhash.xxh3_64()
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(2) as beside:
        flush, waiting = None, 0
        for data in _contents(path, specs, tensors):
            hashed = beside.submit(digest.update, data)
            write_all(file, data)
            hashed.result()
            waiting += len(data)
            if waiting >= FLUSH_BYTES and (flush is None or flush.done()):
                _raise_failure(flush)
                flush, waiting = beside.submit(os.fsync, file.fileno()), 0
        _raise_failure(flush)
    return digest.hexdigest()


def header(specs: Sequence[TensorSpec]) -> bytes:
    """Return the bytes before the first tensor; raise WeightsError for an unsupported dtype."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        if spec.dtype not in DTYPES:
            raise WeightsError(
                f"{spec} cannot be written to a safetensors file. Supported: {', '.join(map(str, DTYPES))}."
            )
        entries[spec.name] = {
            "dtype": DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensors_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the xxh3_64 of names and numbers of tensors, all of them, at the speed of the memory."""
    digest = xxhash.xxh3_64()
    for name, tensor in named:
        digest.update(name.encode())
        digest.update(tensor_bytes(tensor.detach().cpu()))
    return digest.hexdigest()


def write_all(file: BinaryIO, data: memoryview) -> None:
    """Write all of it: the kernel takes at most 2 GiB at a time."""
    while len(data):
        data = data[file.write(data) :]


def _contents(
    path: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[memoryview]:
    yield memoryview(header(specs))
    buffer: Tensor | None = None
    for spec, pair in zip(specs, tensors, strict=True):
        if TensorSpec.of(*pair) != spec:
            raise WeightsError(f"{path}: {TensorSpec.of(*pair)} came where {spec} was announced.")
        tensor = pair[1].detach()
        if tensor.device.type != "cpu":
            buffer = _pinned() if buffer is None else buffer
            yield from pieces(tensor, buffer)
        else:
            yield tensor_bytes(tensor.to("cpu"))


def pieces(tensor: Tensor, buffer: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in copies that are valid until the next one, since all use `buffer`."""
    for piece in tensor.contiguous().reshape(-1).view(torch.uint8).split(len(buffer)):
        yield tensor_bytes(buffer[: len(piece)].copy_(piece))


def _pinned() -> Tensor:
    """Return memory that a GPU copies to several times faster than to other memory, if the system grants it."""
    try:
        return torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(PINNED_BYTES, dtype=torch.uint8)


def _raise_failure(flush: Future[None] | None) -> None:
    """Raise what a flush failed with: the kernel tells it once, and a later fsync of the same file succeeds."""
    if flush is not None:
        flush.result()


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file by name, read on access; a missing or damaged file raises OSError or SafetensorError
    at once."""

    def __init__(self, path: Path):
        self._file = safe_open(path, framework="pt")
        self._names = dict.fromkeys(self._file.keys())

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor without reading it."""
        return torch.Size(self._file.get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
