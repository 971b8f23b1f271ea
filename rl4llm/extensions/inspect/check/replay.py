"""Recompute an optimizer step that was not finite: ``rl4llm check runs/NAME/failed/step-000012``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rl4llm.commands.output import Facts
from rl4llm.compose import build_algorithm, build_model, build_teacher
from rl4llm.config import load_config
from rl4llm.core.base_backend import TokenLosses, TokenMetrics
from rl4llm.core.errors import DataError
from rl4llm.core.images import Image
from rl4llm.core.registry import load
from rl4llm.core.types import TrainBatch
from rl4llm.runs.failed_update import BATCHES, FACTS, MODEL

CONTEXT = 8  # tokens shown before one that is not finite


@dataclass(frozen=True, slots=True)
class FailedUpdate:
    """What `save_update` wrote. `facts` holds step, model, algorithm (its state) and metrics."""

    batches: list[TrainBatch]
    facts: dict[str, Any]
    model: Path


def replay(directory: Path) -> Iterator[Facts]:
    """Recompute the step on its saved weights and batches; yield what was not finite, and where it was first.

    One process with plain torch suffices for every backend and number of ranks, since each rank saved its batches.
    Raises DataError if `directory` does not contain such a step.
    """
    update = load_update(directory)
    config = load_config(directory.parent.parent / "config.yaml", of_run=True)
    config = replace(config, backend={"name": "torch"})
    algorithm = build_algorithm(config)
    algorithm.restore(update.facts["algorithm"])
    model = build_model(config, algorithm, update.facts["model"])
    model.load(update.model)
    yield _inputs(update)
    seen: list[str] = []
    losses: TokenLosses = algorithm.token_losses
    if update.facts["model"] == "critic":
        losses = lambda batch, values_BT, entropy_BT: algorithm.value_losses(batch, values_BT)  # noqa: E731
    needs = algorithm.needs()
    # Rows of a dataset were not sampled at any temperature.
    temperature = (config.rollout.temperature or 1.0) if needs.learns_from == "episodes" else 1.0
    head = None
    if (divergence := needs.divergence) is not None:
        # the whole vocabulary comes from its output layer
        teacher = None if divergence.top else build_teacher(config, algorithm, model)
        head = load("rl4llm.trainers.passes:head_of")(divergence, teacher)
    for number, batch in enumerate(update.batches):
        watched = partial(_watched, losses, f"micro-batch {number}", seen)
        model.forward_backward(batch, watched, temperature=temperature, entropy=needs.entropy, head=head)
    yield _results(update, seen, model.optim_step())


def load_update(directory: Path) -> FailedUpdate:
    """Read one back; raises DataError when there is none."""
    try:
        facts = json.loads((directory / FACTS).read_text())
        batches = _batches(load_file(directory / BATCHES), facts["images"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(
            f"{directory} holds no optimizer step that can be read ({type(error).__name__}: {error}). Next: name one that "
            "a run wrote, such as runs/NAME/failed/step-000012."
        ) from error
    rank_0 = directory.with_name(directory.name.partition("-rank")[0])  # whose directory has the model
    return FailedUpdate(batches, facts, rank_0 / MODEL)


def _watched(
    losses: TokenLosses,
    where: str,
    seen: list[str],
    batch: TrainBatch,
    numbers_BT: Tensor,
    entropy_BT: Tensor | None,
) -> tuple[Tensor, TokenMetrics]:
    """Compute the losses, and add a line to `seen` for everything that is not finite on the policy's tokens."""
    seen += _lines(where, "the model's output", numbers_BT, batch)
    losses_BT, metrics = losses(batch, numbers_BT, entropy_BT)
    seen += _lines(where, "loss", losses_BT, batch)
    return losses_BT, metrics


def _inputs(update: FailedUpdate) -> Facts:
    rows = []
    for number, batch in enumerate(update.batches):
        bad = [
            f"{name}: {count}"
            for name, value in batch.tensors().items()
            if value.is_floating_point() and (count := int((~value.isfinite()).sum()))
        ]
        rows.append((number, int(batch.mask_BT.sum()), bad))
    columns = ("micro-batch", "policy tokens", "not finite before any computation")
    return Facts("batches", "batches", columns, rows)


def _results(update: FailedUpdate, seen: list[str], metrics: dict[str, float]) -> Facts:
    rows = [
        ("gradient norm", f"{metrics['grad_norm']:.6g}"),
        ("when it ran", str(update.facts["metrics"].get("grad_norm", "-"))),
    ]
    finite = "all outputs and losses: the gradient overflows, or this machine does not reproduce the failure"
    rows += [("not finite", line) for line in seen] or [("finite", finite)]
    title = f"step {update.facts['step']}, {update.facts['model']}, recomputed"
    return Facts("found", title, ("what", "value"), rows)


def _lines(where: str, what: str, x_BT: Tensor, batch: TrainBatch) -> list[str]:
    bad_BT = batch.mask_BT & ~x_BT.detach().isfinite()
    if not bad_BT.any():
        return []
    row, column = (int(place) for place in bad_BT.nonzero()[0])
    before = batch.token_ids_BT[row, max(0, column - CONTEXT) : column + 1].tolist()
    tensors = batch.tensors()
    names = [name for name in ("sampled_logprobs_BT", "advantages_BT") if name in tensors]
    values = ", ".join(f"{name}={float(tensors[name][row, column]):.4g}" for name in names)
    place = f"row {row}, column {column} (token ids up to it: {before}; {values})"
    return [f"{where}: {what} of {int(bad_BT.sum())} tokens, first in {place}"]


def _batches(
    tensors: Mapping[str, Tensor], images: Sequence[Sequence[Mapping[str, Any]]]
) -> list[TrainBatch]:
    by_batch: list[dict[str, Tensor]] = [{} for _ in images]
    for name, tensor in tensors.items():
        number, _, field = name.partition("/")
        by_batch[int(number)][field] = tensor
    return [
        TrainBatch.of(fields, tuple(Image(**image) for image in batch_images))
        for fields, batch_images in zip(by_batch, images, strict=True)
    ]
