"""Which keys to change when a run does not fit: each change is planned, not guessed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl4llm.config import Config
from rl4llm.core.errors import RL4LLMError
from rl4llm.plan.plan import Plan, make_plan

WORTH = 0.97
"""A change is told when it lowers the peak to this share of it, or below."""


@dataclass(frozen=True, slots=True)
class Change:
    """Keys as they would be written on the command line, and the peak with them, in bytes."""

    overrides: tuple[str, ...]
    peak: int
    fits: bool


def changes(plan: Plan) -> list[Change]:
    """What would lower the peak, those first that make the run fit, then those that save most."""
    found = []
    for overrides, config in _candidates(plan):
        try:
            changed = make_plan(config, plan.devices, plan.memory)
        except RL4LLMError:  # the change is not possible here
            continue
        if changed.peak.total <= WORTH * plan.peak.total:
            found.append(Change(overrides, changed.peak.total, changed.fits))
    return sorted(found, key=lambda change: (not change.fits, change.peak))


def _candidates(plan: Plan) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Changes that go with the configuration; what changes least of the results is first."""
    config, counts = plan.config, plan.counts
    model, training = config.model, config.training
    if not model.gradient_checkpointing:
        yield ("model.gradient_checkpointing=true",), _with(config, "model", gradient_checkpointing=True)
    smaller = max(counts.longest, counts.padded // 2)
    if smaller < counts.padded:
        yield (f"training.max_tokens_per_batch={smaller}",), _with(config, "training", max_tokens_per_batch=smaller)
        if not model.gradient_checkpointing:
            both = _with(_with(config, "model", gradient_checkpointing=True), "training", max_tokens_per_batch=smaller)
            yield ("model.gradient_checkpointing=true", f"training.max_tokens_per_batch={smaller}"), both
    rows = int(config.inference.get("max_rows", 256))
    if config.inference["name"] == "local" and min(rows, counts.trajectories) > 8:
        half = min(rows, counts.trajectories) // 2
        yield (f"inference.max_rows={half}",), dataclasses.replace(config, inference={**config.inference, "max_rows": half})
    yield from _shared_out(plan)
    if not model.lora.rank and training.lr:
        lora = dataclasses.replace(model.lora, rank=16)
        yield ("model.lora.rank=16",), _with(config, "model", lora=lora)
    if model.dtype == "float32":
        yield ("model.dtype=bfloat16",), _with(config, "model", dtype="bfloat16", autocast="none")


def _shared_out(plan: Plan) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Of several devices each may hold a part; of one, the optimizer may lie in the memory of the CPU."""
    config, backend = plan.config, plan.config.backend
    if plan.devices > 1 and backend["name"] == "torch" and backend.get("shard") != "fsdp2":
        yield ("backend.shard=fsdp2",), _backend(config, {**backend, "shard": "fsdp2"})
    if plan.devices > 1 and backend["name"] == "deepspeed" and backend.get("zero_stage") != 3:
        yield ("backend.zero_stage=3",), _backend(config, {**backend, "zero_stage": 3})
    if plan.device != "cpu" and backend["name"] == "deepspeed" and not backend.get("offload_optimizer"):
        yield ("backend.offload_optimizer=true",), _backend(config, {**backend, "offload_optimizer": True})
    if plan.device != "cpu" and plan.devices > 1 and backend.get("shard") == "fsdp2" and not backend.get("cpu_offload"):
        yield ("backend.cpu_offload=true",), _backend(config, {**backend, "cpu_offload": True})


def _with(config: Config, section: str, **values: Any) -> Config:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def _backend(config: Config, backend: Mapping[str, Any]) -> Config:
    return dataclasses.replace(config, backend=dict(backend))
