"""Looking again at an optimizer step that was not finite: ``rl4llm replay runs/NAME/failed/step-000012``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from rl4llm.build import build_algorithm, build_model
from rl4llm.config import Config, load_config
from rl4llm.core.base_algorithm import BaseAlgorithm
from rl4llm.core.base_backend import TokenLosses, TokenMetrics
from rl4llm.core.errors import DataError
from rl4llm.core.failed_update import FailedUpdate, load_update
from rl4llm.core.types import TrainBatch
from rl4llm.tables import Facts

CONTEXT = 8  # tokens shown before one that is not finite


def replay(directory: Path) -> Iterator[Facts]:
    """Recompute the step, on its own weights and batches; what comes says what was not finite, and where it was first.

    One process with plain torch does, whatever backend and however many ranks it ran on: each kept its own batches.
    Raises DataError when `directory` holds no such step.
    """
    update = load_update(directory)
    config = _config(directory)
    algorithm = build_algorithm(config)
    algorithm.restore(update.facts["algorithm"])
    model = build_model(config, algorithm, update.facts["model"])
    model.load(update.model)
    yield _given(update)
    seen: list[str] = []
    losses = _losses(algorithm, update.facts["model"])
    for number, batch in enumerate(update.batches):
        watched = partial(_watched, losses, f"micro-batch {number}", seen)
        model.forward_backward(
            batch, watched, temperature=_temperature(config, algorithm), entropy=algorithm.needs().entropy
        )
    yield _found(update, seen, model.optim_step())


def _config(directory: Path) -> Config:
    file = directory.parent.parent / "config.yaml"
    if not file.is_file():
        raise DataError(f"{directory} lies in no run: there is no {file}. Replay a step where the run wrote it.")
    return replace(load_config(file), backend={"name": "torch"})


def _temperature(config: Config, algorithm: BaseAlgorithm) -> float:
    """What is read from a dataset was not sampled at any."""
    sampled = algorithm.needs().learns_from == "episodes"
    return (config.rollout.temperature or 1.0) if sampled else 1.0


def _losses(algorithm: BaseAlgorithm, model: str) -> TokenLosses:
    if model == "critic":
        return lambda batch, values_BT, entropy_BT: algorithm.value_losses(batch, values_BT)
    return algorithm.token_losses


def _watched(
    losses: TokenLosses, where: str, seen: list[str], batch: TrainBatch, numbers_BT: Tensor, entropy_BT: Tensor | None
) -> tuple[Tensor, TokenMetrics]:
    """The losses, with a line in `seen` for everything that is not finite on the policy's tokens."""
    seen += _lines(where, "the model's output", numbers_BT, batch)
    losses_BT, metrics = losses(batch, numbers_BT, entropy_BT)
    seen += _lines(where, "loss", losses_BT, batch)
    return losses_BT, metrics


def _given(update: FailedUpdate) -> Facts:
    """What the step was given."""
    rows = []
    for number, batch in enumerate(update.batches):
        bad = [
            f"{name}: {count}"
            for name, value in batch.tensors().items()
            if value.is_floating_point() and (count := int((~value.isfinite()).sum()))
        ]
        rows.append((number, batch.num_policy_tokens, bad))
    columns = ("micro-batch", "policy tokens", "not finite before any computation")
    return Facts("batches", "batches", columns, rows)


def _found(update: FailedUpdate, seen: list[str], metrics: dict[str, float]) -> Facts:
    rows = [
        ("gradient norm", f"{metrics['grad_norm']:.6g}"),
        ("when it ran", str(update.facts["metrics"].get("grad_norm", "-"))),
    ]
    for line in seen or ["every output and loss is finite: the gradient overflows, or it does not happen on this machine"]:
        rows.append(("not finite" if seen else "finding", line))
    title = f"step {update.facts['step']}, {update.facts['model']}, computed again"
    return Facts("found", title, ("what", "value"), rows)


def _lines(where: str, what: str, x_BT: Tensor, batch: TrainBatch) -> list[str]:
    bad_BT = batch.mask_BT & ~x_BT.detach().isfinite()
    if not bad_BT.any():
        return []
    row, column = (int(place) for place in bad_BT.nonzero()[0])
    before = batch.token_ids_BT[row, max(0, column - CONTEXT) : column + 1].tolist()
    held = batch.tensors()
    values = {name: float(held[name][row, column]) for name in ("sampled_logprobs_BT", "advantages_BT") if name in held}
    return [
        f"{where}: {what} of {int(bad_BT.sum())} tokens, first in row {row}, column {column} (token ids up to it: {before}; "
        + ", ".join(f"{name}={value:.4g}" for name, value in values.items())
        + ")"
    ]
