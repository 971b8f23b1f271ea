"""The weight store: versions of the weights in a directory that trainer and servers share; a version never changes.

    weights/
      LATEST                     "v000012": the newest complete version
      v000012/                   an ordinary Hugging Face directory, so that a server can also start from it
        model-00001-of-00002.safetensors ... model.safetensors.index.json config.json tokenizer.json ...
        manifest.json            kind, names, shapes and dtypes of the tensors; size and xxh3 of every file
      v000013.tmp-1f2e3d4c/      an unfinished write
      .lock                      the process that writes here

A version of an adapter is an ordinary PEFT directory: adapter_model.safetensors, adapter_config.json and the manifest.

A version gets its name when it is complete and on disk. A server that has mapped a file would crash if it changed.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rl4llm.core.errors import RunDirError, WeightsError
from rl4llm.core.weights import TensorSpec, WeightRef
from rl4llm.runs import manifest
from rl4llm.runs.lock import DirectoryLock
from rl4llm.runs.run_dir import is_full, sync_directory, write_atomically
from rl4llm.runs.tensor_file import write_tensors

FINAL = re.compile(r"v(\d{6,})")
UNFINISHED = re.compile(r"v\d{6,}\.tmp-[0-9a-f]+")
SHARD_BYTES = 4 << 30
ADAPTER = "adapter_model.safetensors"
Kind = Literal["full", "lora"]


class WeightStore:
    """Versions under `root`. The newest `keep` are kept, and those that a server is loading.

    A store that writes or leases versions owns its directory until `close`: two stores would delete each other's versions.
    Matrices of models are written in `dtype` if they are in float32: half of the bytes for a server that computes in bf16.
    Before the first version of a whole model, `choose` gets its bytes and may return a directory in memory to use instead of
    `root`, which exists until `close`.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        keep: int = 2,
        shard_bytes: int = SHARD_BYTES,
        dtype: torch.dtype = torch.float32,
        choose: Callable[[int], Path | None] | None = None,
    ):
        self.root = self._on_disk = Path(root).absolute()
        self._choose = choose
        self._keep = keep
        self.dtype = dtype
        self._shard_bytes = shard_bytes
        self._leases: Counter[int] = Counter()
        self._guard = threading.Lock()
        self._writing: Path | None = None
        self._lock: DirectoryLock | None = None

    def write(
        self,
        version: int,
        specs: Sequence[TensorSpec],
        tensors: Iterator[tuple[str, Tensor]],
        write_config: Callable[[Path], None] = lambda directory: None,
        *,
        kind: Kind = "full",
    ) -> WeightRef:
        """Write a version, one tensor at a time. To write the same weights again changes nothing.

        `tensors` must match `specs`, the model's list, in order; `write_config` writes the other files of a Hugging Face
        directory.

        Raises WeightsError for a tensor that is missing, extra, not finite or of another shape or dtype, for a full disk,
        and when another store writes to this directory. Earlier versions stay as they were.
        """
        narrows = kind == "full" and self.dtype != torch.float32
        if narrows:
            specs, tensors = narrowed(specs, tensors, self.dtype)
        self._own(sum(spec.num_bytes for spec in specs) if kind == "full" else 0)
        directory = self.root / f"v{version:06d}.tmp-{secrets.token_hex(4)}"
        self._writing = directory
        try:
            directory.mkdir(parents=True)
            hashes = self._write_tensors(directory, specs, tensors, kind)
            write_config(directory)
            if narrows:
                _name_dtype(directory / "config.json", self.dtype)
            listed = {spec.name: [list(spec.shape), str(spec.dtype)] for spec in specs}
            manifest.seal(directory, known_hashes=hashes, version=version, kind=kind, tensors=listed)
            final = self._commit(directory, version)
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, OSError) or is_full(error):
                raise WeightsError(
                    f"Version {version} of the weights could not be written to {self.root}: {error}. Set another sync.dir, "
                    "or a lower sync.keep if it is full."
                ) from error
            raise
        finally:
            self._writing = None
        self.prune()
        return self.ref(version, final)

    def latest(self) -> WeightRef | None:
        """Return the version that LATEST names, which was complete when it was named; None if there is none, or not yet."""
        try:
            name = (self.root / "LATEST").read_text().strip()
            match = FINAL.fullmatch(name)
            return self.ref(int(match[1]), self.root / name) if match else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # a shared file system may show LATEST before the version
            return None

    def ref(self, version: int, path: Path) -> WeightRef:
        """Describe a version to clients, with its kind and checksums from its manifest."""
        listed = json.loads((path / manifest.NAME).read_text())
        checksums = {name: entry["xxh3_64"] for name, entry in listed["files"].items()}
        return WeightRef(version, listed.get("kind", "full"), str(path), checksums)

    def verify(self, weight_ref: WeightRef) -> None:
        """Read every byte back; raise WeightsError if the version differs from what was written."""
        assert weight_ref.path is not None  # set by `ref`
        problem = manifest.damage(Path(weight_ref.path), version=weight_ref.version)
        if problem:
            raise WeightsError(f"{weight_ref.path} is damaged: {problem}. Check the file system.")

    @contextmanager
    def lease(self, version: int) -> Iterator[None]:
        """Keep a version while servers load it; raise WeightsError if another store writes to this directory."""
        self._own()
        with self._guard:
            self._leases[version] += 1
        try:
            yield
        finally:
            with self._guard:
                self._leases[version] -= 1
            self.prune()

    def prune(self) -> None:
        """Delete versions that are neither among the newest nor leased, and the files of interrupted writes.

        A store that does not own the directory deletes nothing.
        """
        with self._guard:
            if self._lock is None or not self.root.is_dir():
                return
            finals = sorted(self._finals(), key=_version)
            latest = self.latest()
            versions = {_version(path) for path in finals[-self._keep :]} | {
                v for v, n in self._leases.items() if n > 0
            }
            if latest is not None:
                versions.add(latest.version)
            for path in finals:
                if _version(path) not in versions:
                    path.rename(path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}"))
            for path in list(self.root.iterdir()):
                if UNFINISHED.fullmatch(path.name) and path != self._writing:
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name.startswith("LATEST.tmp-"):
                    path.unlink()

    def close(self) -> None:
        """Release the directory; a second call does nothing."""
        with self._guard:
            if self._lock is not None:
                if self.root != self._on_disk:
                    shutil.rmtree(self.root.parent, ignore_errors=True)
                self._lock.release()
                self._lock = None

    def leave_memory(self) -> bool:
        """Continue in `root` if the store uses a directory in memory; return whether it did."""
        if self.root == self._on_disk:
            return False
        self.close()
        self.root, self._choose = self._on_disk, None
        return True

    def _own(self, num_bytes: int = 0) -> None:
        with self._guard:
            if self._lock is not None:
                return
            try:
                chosen = self._choose(num_bytes) if self._choose and num_bytes else None
                if chosen is not None:
                    self.root = chosen
                self.root.mkdir(parents=True, exist_ok=True)
                self._lock = DirectoryLock(self.root)
            except (RunDirError, OSError) as error:
                raise WeightsError(
                    f"Weights cannot be written to {self.root}: {error} Set another sync.dir."
                ) from error

    def _commit(self, directory: Path, version: int) -> Path:
        final = self.root / f"v{version:06d}"
        if final.exists():
            if manifest.same(final, directory) and manifest.damage(final, version=version) is None:
                shutil.rmtree(directory)
            else:  # damaged, or from a run that resumed from an older step: no server may load it
                self._withdraw(final)
                final.rename(self.root / f"v{version:06d}.tmp-{secrets.token_hex(4)}")
                directory.rename(final)
        else:
            directory.rename(final)
        sync_directory(self.root)
        write_atomically(self.root / "LATEST", final.name + "\n")
        return final

    def _withdraw(self, final: Path) -> None:
        """Have LATEST name an older version, or none, before this one is removed: it must never name a missing version."""
        latest = self.root / "LATEST"
        if latest.exists() and latest.read_text().strip() == final.name:
            older = [path for path in self._finals() if _version(path) < _version(final)]
            if older:
                write_atomically(latest, max(older, key=_version).name + "\n")
            else:
                latest.unlink()

    def _write_tensors(
        self, directory: Path, specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, Tensor]], kind: Kind
    ) -> dict[str, str]:
        """Write the tensors as safetensors shards, an adapter as one shard; return the hash of each."""
        if kind == "lora":
            shards, names = [list(specs)], [ADAPTER]
        else:
            shards = plan_shards(specs, self._shard_bytes)
            names = [
                f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
            ]
        tensors = checked(specs, tensors)
        hashes = {
            name: write_tensors(directory / name, shard, islice(tensors, len(shard)))
            for name, shard in zip(names, shards, strict=True)
        }
        deque(tensors, maxlen=0)  # raises if there are more
        if kind == "full":
            index = {
                "metadata": {"total_size": sum(spec.num_bytes for spec in specs)},
                "weight_map": {
                    spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard
                },
            }
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        return hashes

    def _finals(self) -> list[Path]:
        return [path for path in self.root.iterdir() if FINAL.fullmatch(path.name) and path.is_dir()]


def _version(path: Path) -> int:
    return int(path.name.removeprefix("v"))


def plan_shards(specs: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Split tensors, in order, into shards of at most `shard_bytes`; a larger tensor is a shard by itself."""
    shards: list[list[TensorSpec]] = [[]]
    room = shard_bytes
    for spec in specs:
        if shards[-1] and spec.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    return shards


def narrowed(
    specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype
) -> tuple[list[TensorSpec], Iterator[tuple[str, Tensor]]]:
    """Return the same with float32 matrices in `dtype`; norms and biases are small and may be float32 on the server."""

    def is_wide(shape: Sequence[int], found: torch.dtype) -> bool:
        return found == torch.float32 and len(shape) > 1

    narrow = [replace(spec, dtype=dtype) if is_wide(spec.shape, spec.dtype) else spec for spec in specs]
    cast = (
        (name, tensor.to(dtype) if is_wide(tensor.shape, tensor.dtype) else tensor)
        for name, tensor in tensors
    )
    return narrow, cast


def _name_dtype(config: Path, dtype: torch.dtype) -> None:
    """Write `dtype` into a config that names one, so that a server which starts from these files computes in it."""
    if not config.exists():
        return
    content = json.loads(config.read_text())
    for part in (content, *(value for value in content.values() if isinstance(value, dict))):
        part.update(
            {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in part}
        )
    config.write_text(json.dumps(content, indent=2) + "\n")


def checked(
    specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors`; raise WeightsError where they do not match `specs` exactly, or hold values that are not finite."""
    for spec, pair in zip_longest(specs, tensors):
        actual = pair and TensorSpec.of(*pair)
        if actual != spec:
            raise WeightsError(f"The weights contain {actual} where the model's list of tensors has {spec}.")
        name, tensor = pair
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor.detach())  # NaN wins over every number, so these two suffice
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise WeightsError(
                    f"{name} holds values that are not finite. Resume from an earlier checkpoint with a lower training.lr."
                )
        yield pair
