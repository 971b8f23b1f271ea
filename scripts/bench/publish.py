"""What a version in the weight store costs over a plain `safetensors.save_file` of the same tensors.

    python scripts/bench/publish.py --mib 512

Publishing checks every tensor against the model's list and for numbers that are not finite, hashes it, writes a manifest,
forces all of it to disk, renames, and reads every byte back. Both sides end with the data on disk: the plain side calls
fsync after saving. The two take turns, each into separate files that are deleted afterwards.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl4llm.core.types import TensorSpec
from rl4llm.extensions.servers.sync.store import WeightStore

COLUMNS = 2048


def random_weights(mib: int) -> dict[str, Tensor]:
    """Tensors of 16 MiB each, like the projections of a model."""
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{i}.weight": torch.randn(2048, COLUMNS, generator=generator) for i in range(mib // 16)}


def plain(weights: dict[str, Tensor], directory: Path) -> None:
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    with open(directory / "model.safetensors", "rb") as file:
        os.fsync(file.fileno())


def published(weights: dict[str, Tensor], directory: Path) -> None:
    store = WeightStore(directory)
    specs = [TensorSpec.of(name, tensor) for name, tensor in weights.items()]
    store.verify(store.write(1, specs, iter(weights.items())))


def seconds(save: Callable[[dict[str, Tensor], Path], None], weights: dict[str, Tensor], root: Path) -> float:
    directory = root / save.__name__
    start = time.perf_counter()
    save(weights, directory)
    taken = time.perf_counter() - start
    shutil.rmtree(directory)
    os.sync()  # what the one side left to be written is not the other's to wait for
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--dir", default=None, help="on the file system to measure (default: the temporary directory)"
    )
    options = parser.parse_args()
    weights = random_weights(options.mib)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        root = Path(directory)
        for save in (plain, published):
            seconds(save, weights, root)
        pairs = [
            tuple(seconds(save, weights, root) for save in (plain, published)) for _ in range(options.pairs)
        ]
    for name, times in zip(("plain", "published"), zip(*pairs, strict=True), strict=True):
        print(f"{name:10} median {statistics.median(times):6.3f} s   best {min(times):6.3f} s")
    ratios = [theirs / ours for theirs, ours in pairs]
    medians = [statistics.median(times) for times in zip(*pairs, strict=True)]
    print(
        f"cost over plain: {medians[1] / medians[0] - 1:+.1%} (pairs: {min(1 / r for r in ratios) - 1:+.1%} to ",
        end="",
    )
    print(f"{max(1 / r for r in ratios) - 1:+.1%})")


if __name__ == "__main__":
    main()
