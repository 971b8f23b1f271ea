"""Weights that a trainer published as files: all of them are checked before one number of the served model changes."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedModel

from rl4llm.backends.models import load_model
from rl4llm.core.errors import WeightsError
from rl4llm.core.images import IMAGE_SIDE, tower_of
from rl4llm.runs import manifest

UNSEEN = "does not exist on the server's machine"


def read_weights(path: str, version: int, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a version by their names in `model`.

    A version is a model directory of any origin; one with a manifest must be what the manifest lists. Raises WeightsError
    for a version that is missing, damaged, or of another model, and ModelError for files that cannot be read.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise WeightsError(f"{path} {UNSEEN}.")
    sealed = (directory / manifest.NAME).exists()
    if problem := manifest.damage(directory, version=version, kind="full") if sealed else "":
        raise WeightsError(f"Version {version} of the weights in {path} is damaged: {problem}.")
    source = load_model(directory, dtype=model.dtype, device=model.device)
    if (tower := tower_of(model)) is not None:
        source.add_module(IMAGE_SIDE, type(tower).read(directory, tower.vision, model.dtype).parts)
    current, tensors = _tensors(model), _tensors(source)
    shapes = [{(name, tuple(tensor.shape)) for name, tensor in side.items()} for side in (current, tensors)]
    if differ := sorted(shapes[0] ^ shapes[1]):
        raise WeightsError(f"The weights in {path} are not of the model that is served: {differ[:3]}.")
    return tensors


@torch.no_grad()
def checksum(model: PreTrainedModel) -> str:
    """Return a digest of the names and numbers of a model's parameters."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
