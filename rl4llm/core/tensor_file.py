"""Safetensors files written and read one tensor at a time.

The library writes a file from tensors that are all in memory at once. The format is an 8-byte length, a JSON header with
each tensor's dtype, shape and place, and the tensors' bytes in that order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from rl4llm.core.errors import WeightsError
from rl4llm.core.types import TensorSpec

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ALIGNMENT = 8  # of the first tensor, so that readers can map them


def write_tensors(path: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write `tensors`, which are those of `specs` in their order, holding one at a time; raises OSError."""
    with open(path, "wb", buffering=0) as file:
        write_all(file, memoryview(header(specs)))
        for spec, given in zip(specs, tensors, strict=True):
            if TensorSpec.of(*given) != spec:
                raise WeightsError(f"{path}: {TensorSpec.of(*given)} came where {spec} was announced.")
            write_all(file, tensor_bytes(given[1].detach().to("cpu")))


def header(specs: Sequence[TensorSpec]) -> bytes:
    """What stands before the first tensor's bytes; raises WeightsError for a dtype that the format does not have."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        if spec.dtype not in DTYPES:
            raise WeightsError(f"{spec} cannot be written: safetensors files here hold {', '.join(map(str, DTYPES))}.")
        entries[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def write_all(file: BinaryIO, data: memoryview) -> None:
    """Write all of it: the kernel takes at most 2 GiB at a time."""
    while len(data):
        data = data[file.write(data) :]


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file by name, each read when it is asked for; raises OSError or SafetensorError at once for a
    file that is missing or damaged."""

    def __init__(self, path: Path):
        self._file = safe_open(path, framework="pt")
        self._names = dict.fromkeys(self._file.keys())

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor, without reading it."""
        return torch.Size(self._file.get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
