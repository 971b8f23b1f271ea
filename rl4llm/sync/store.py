"""The weight store: versions of the weights in a directory that trainer and servers share, each written once, never changed.

    weights/
      LATEST                     "v000012": the newest version that is whole
      v000012/                   an ordinary Hugging Face directory, so that a server can also start from it
        model-00001-of-00002.safetensors ... model.safetensors.index.json config.json tokenizer.json ...
        manifest.json            kind, names, shapes and dtypes of the tensors; size and xxh3 of every file
      v000013.tmp-1f2e3d4c/      a write that never finished
      .lock                      who writes here

A version of an adapter is an ordinary PEFT directory: adapter_model.safetensors, adapter_config.json and the manifest.

A version gets its name when it is complete and on disk. A server that has a file mapped would die if it were changed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from torch import Tensor

from rl4llm.core import manifest
from rl4llm.core.errors import RunDirError, WeightsError
from rl4llm.core.lock import DirectoryLock
from rl4llm.core.run_dir import is_full, space, sync_directory, write_atomically
from rl4llm.core.types import TensorSpec, WeightRef
from rl4llm.sync.shards import check_ended, plan_shards, write_shard

FINAL = re.compile(r"v(\d{6,})")
UNFINISHED = re.compile(r"v\d{6,}\.tmp-[0-9a-f]+")
SHARD_BYTES = 4 << 30
ADAPTER = "adapter_model.safetensors"
Kind = Literal["full", "lora"]


class WeightStore:
    """Versions under `root`; the newest `keep` stay, and those that a server is loading.

    A store that writes or lends owns its directory until `close`: two of them would delete each other's versions.
    """

    def __init__(self, root: Path, *, keep: int = 2, shard_bytes: int = SHARD_BYTES):
        self.root = root.absolute()
        self._keep = keep
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
        """Write a version, one tensor at a time; the same weights again give the same version, and change nothing.

        `specs` is the model's own list of tensors, which `tensors` must follow. `write_config` adds what else a Hugging
        Face directory needs; of `kind` "lora" it is an adapter's. Raises WeightsError for a tensor that is missing, extra,
        of another shape or dtype, or not finite, for a full disk, and when another store writes to this directory; what was
        there before is then as it was.
        """
        self._own()
        directory = self.root / f"v{version:06d}.tmp-{secrets.token_hex(4)}"
        self._writing = directory
        try:
            directory.mkdir(parents=True)
            hashes = self._write_tensors(directory, specs, tensors, kind)
            write_config(directory)
            listed = {spec.name: [list(spec.shape), str(spec.dtype)] for spec in specs}
            manifest.seal(directory, known_hashes=hashes, version=version, kind=kind, tensors=listed)
            final = self._commit(directory, version)
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, OSError) or is_full(error):
                raise WeightsError(
                    f"Version {version} of the weights could not be written to {self.root}: {error}. Versions before are "
                    f"intact. {self._advice(error, sum(spec.num_bytes for spec in specs))}"
                ) from error
            raise
        finally:
            self._writing = None
        self.prune()
        return self.ref(version, final)

    def latest(self) -> WeightRef | None:
        """The version that LATEST names, which was whole when it got its name; None when there is none to be seen."""
        try:
            name = (self.root / "LATEST").read_text().strip()
            found = FINAL.fullmatch(name)
            return self.ref(int(found[1]), self.root / name) if found else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a file system that shows one before the other
            return None

    def ref(self, version: int, path: Path) -> WeightRef:
        """How clients are told of a version."""
        listed = json.loads((path / manifest.NAME).read_text())
        checksums = {name: entry["xxh3_64"] for name, entry in listed["files"].items()}
        return WeightRef(version, listed.get("kind", "full"), str(path), checksums)

    def verify(self, weight_ref: WeightRef) -> None:
        """Read every byte back; raises WeightsError when the version is not what was written."""
        assert weight_ref.path is not None  # it came from here
        problem = manifest.damage(Path(weight_ref.path), version=weight_ref.version)
        if problem:
            raise WeightsError(
                f"Version {weight_ref.version} of the weights in {weight_ref.path} is damaged: {problem}. No server was "
                "asked to load it. Next: check the file system; the version is written again at the next step."
            )

    @contextmanager
    def lease(self, version: int) -> Iterator[None]:
        """Keep a version while a server loads it; raises WeightsError when another store writes to this directory."""
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
        """Delete what is neither among the newest nor leased, and what interrupted writes left behind.

        A store that does not own the directory, or no longer, deletes nothing.
        """
        with self._guard:
            if self._lock is None or not self.root.is_dir():
                return
            finals = sorted(self._finals(), key=_version)
            latest = self.latest()
            kept = {_version(path) for path in finals[-self._keep :]} | {v for v, n in self._leases.items() if n > 0}
            if latest is not None:
                kept.add(latest.version)
            for path in finals:
                if _version(path) not in kept:
                    path.rename(path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}"))
            for path in list(self.root.iterdir()):
                if UNFINISHED.fullmatch(path.name) and path != self._writing:
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name.startswith("LATEST.tmp-"):
                    path.unlink()

    def close(self) -> None:
        """Let the directory go; a second call does nothing."""
        with self._guard:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _own(self) -> None:
        with self._guard:
            if self._lock is not None:
                return
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                self._lock = DirectoryLock(self.root)
            except RunDirError as error:
                reason, _, _ = str(error).partition(" Next: ")
                raise WeightsError(
                    f"Weights cannot be written: {reason} Next: stop that one first, or give this run another sync.dir."
                ) from error
            except OSError as error:
                raise WeightsError(f"Weights cannot be written to {self.root}: {error}. {self._advice(error, 0)}") from error

    def _advice(self, error: BaseException, needed: int) -> str:
        if not is_full(error):
            return "Next: see that this is a directory that may be written to, or give another one (sync.dir)."
        existing = next(path for path in (self.root, *self.root.parents) if os.path.exists(path))
        return f"{space(existing, needed)} Next: free some space, or keep fewer (sync.keep)."

    def _commit(self, directory: Path, version: int) -> Path:
        final = self.root / f"v{version:06d}"
        if final.exists():
            if manifest.same(final, directory) and manifest.damage(final, version=version) is None:
                shutil.rmtree(directory)
            else:  # abandoned by a resume from an older step, or damaged: nobody may load it any more
                self._withdraw(final)
                final.rename(self.root / f"v{version:06d}.tmp-{secrets.token_hex(4)}")
                directory.rename(final)
        else:
            directory.rename(final)
        sync_directory(self.root)
        write_atomically(self.root / "LATEST", final.name + "\n")
        return final

    def _withdraw(self, final: Path) -> None:
        """Have LATEST name an older version, or none, before this one goes: it must never name what is not there."""
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
        """Write the tensors as safetensors shards, an adapter's as one; returns the hash of each."""
        if kind == "lora":
            shards, names = [list(specs)], [ADAPTER]
        else:
            shards = plan_shards(specs, self._shard_bytes)
            names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        hashes = {name: write_shard(directory / name, shard, tensors) for name, shard in zip(names, shards, strict=True)}
        check_ended(tensors)
        if kind == "full":
            index = {
                "metadata": {"total_size": sum(spec.num_bytes for spec in specs)},
                "weight_map": {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard},
            }
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        return hashes

    def _finals(self) -> list[Path]:
        return [path for path in self.root.iterdir() if FINAL.fullmatch(path.name) and path.is_dir()]


def _version(path: Path) -> int:
    return int(path.name.removeprefix("v"))
