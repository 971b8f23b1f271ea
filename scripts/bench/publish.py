"""What a version in the weight store costs over a plain `safetensors.save_file` of the same tensors.

    python scripts/bench/publish.py --mib 512

Publishing checks every tensor against the model's list and for numbers that are not finite, hashes it, writes a manifest,
forces all of it to disk, renames, and reads every byte back. Both sides end with the data on disk: the plain side calls
fsync after saving. The two take turns, each into separate files that are deleted afterwards.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from peer import in_turns, parser_of, ratios
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
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--dir", help="on the file system to measure (default: the temporary directory)")
    options = parser.parse_args()
    weights = random_weights(options.mib)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        saves = {
            save.__name__: partial(seconds, save, weights, Path(directory)) for save in (plain, published)
        }
        times = in_turns(saves, options.pairs)
    for name, taken in times.items():
        print(f"{name:10} median {statistics.median(taken):6.3f} s   best {min(taken):6.3f} s")
    cost = statistics.median(times["published"]) / statistics.median(times["plain"]) - 1
    pairs = [ratio - 1 for ratio in ratios(times["published"], times["plain"])]
    print(f"cost over plain: {cost:+.1%} (pairs: {min(pairs):+.1%} to {max(pairs):+.1%})")


if __name__ == "__main__":
    main()
