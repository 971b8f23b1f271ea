"""Checkpoints of the server: one sealed directory for each `tinker://RUN/KIND/NAME`, whole or absent after a kill."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl4llm.core.errors import CheckpointError
from rl4llm.runs import manifest
from rl4llm.runs.run_dir import sync_directory

SCHEME = "tinker://"
WEIGHTS, SAMPLER, PASSING = "weights", "sampler_weights", "passing"
FACTS = "tinker.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
DELETED = "~deleted"  # behind the name of a checkpoint that is being deleted
KEPT = 3  # passing weights of a model, which the next ones replace


def run_of(model_id: str) -> str:
    """Return the name of a model in addresses. It does not tell the model's id, which lets its reader train the model."""
    return hashlib.sha256(model_id.encode()).hexdigest()[:32]


class Store:
    """The directory of a server; `tinker://RUN/weights/NAME` is its `MODEL/weights/NAME`, where RUN is `run_of` MODEL.

    `passing` weights are those of sampling clients without a name; only the newest few of a model stay.
    """

    def __init__(self, root: Path):
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        for left in (*root.glob("*/*/*~*"), *root.glob(f"*/{PASSING}")):  # of a server that was killed
            final = left.with_name(left.name.partition("~")[0])
            if final.exists() or left.name.endswith(DELETED) or manifest.damage(left):
                shutil.rmtree(left, ignore_errors=True)
            else:  # it was about to be replaced, or to be named
                left.rename(final)

    def save(
        self,
        model_id: str,
        kind: str,
        name: str,
        facts: dict[str, Any],
        write: Callable[[Path], Any],
        *,
        overwrite: bool = False,
    ) -> str:
        """Have `write` fill a directory, and give it its name when it is on the disk; return its `tinker://` address."""
        if not NAME.fullmatch(name):
            raise CheckpointError(
                f"path={name!r:.200} is not accepted. Accepted: a name of up to 200 letters, digits and . _ - : characters."
            )
        final = self.root / model_id / kind / name
        if final.exists() and not overwrite:
            raise CheckpointError(f"{self.address(final)} exists. Next: choose another name.")
        unfinished = final.with_name(f"{name}~{secrets.token_hex(4)}")
        unfinished.mkdir(parents=True)
        try:
            write(unfinished)
            (unfinished / FACTS).write_text(json.dumps(facts))
            manifest.seal(unfinished)
            if final.exists():
                final.rename(final.with_name(f"{name}~{secrets.token_hex(4)}"))
            unfinished.rename(final)
        finally:
            for left in final.parent.glob(f"{name}~*"):
                shutil.rmtree(left, ignore_errors=True)
        sync_directory(final.parent)
        if kind == PASSING:
            for old in sorted(final.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        return self.address(final)

    def address(self, path: Path) -> str:
        """Return the address of a checkpoint."""
        return f"{SCHEME}{run_of(path.parts[-3])}/{path.parts[-2]}/{path.parts[-1]}"

    def find(self, address: str, *kinds: str) -> tuple[Path, dict[str, Any]]:
        """Return the directory of an address of these kinds, and its facts; raise CheckpointError if it is not whole."""
        parts = address.removeprefix(SCHEME).split("/")
        if not address.startswith(SCHEME) or len(parts) != 3 or parts[1] not in kinds:
            forms = " or ".join(f"{SCHEME}RUN/{kind}/NAME" for kind in kinds)
            raise CheckpointError(f"{address!r} is not an address of such weights. Accepted: {forms}.")
        if not all(map(NAME.fullmatch, parts)):
            raise CheckpointError(f"{address!r} has a part that is not a name.")
        models = {run_of(path.name): path.name for path in self.root.iterdir()}
        path = self.root.joinpath(models.get(parts[0], parts[0]), *parts[1:])  # or of an earlier version
        if problem := manifest.damage(path) if path.is_dir() else "it was not found":
            raise CheckpointError(
                f"{address} cannot be used: {problem}. This server keeps weights in {self.root}."
            )
        return path, json.loads((path / FACTS).read_text())

    def delete(self, address: str) -> Path:
        """Delete named weights, and return where they were; raise CheckpointError if they were not found."""
        path, _ = self.find(address, WEIGHTS, SAMPLER)
        shutil.rmtree(path.rename(path.with_name(path.name + DELETED)), ignore_errors=True)
        return path

    def drop_passing(self, model_id: str) -> None:
        """Delete the weights of a model that have no name."""
        shutil.rmtree(self.root / model_id / PASSING, ignore_errors=True)
