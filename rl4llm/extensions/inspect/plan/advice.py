"""Which keys to change when a run does not fit: each change is planned, not guessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl4llm.core.errors import RL4LLMError
from rl4llm.extensions.inspect.plan.plan import RunPlan, make_plan
from rl4llm.inference.local import MAX_ROWS

FASTER = 10
"""An adapter learns at about ten times the learning rate of the whole model."""

WORTH = 0.97
"""A change that does not make the run fit is shown if it lowers the peak to at most this share."""


@dataclass(frozen=True, slots=True)
class Change:
    """Keys as written on the command line, and the peak with them in bytes."""

    overrides: tuple[str, ...]
    peak: int
    fits: bool


def changes(plan: RunPlan) -> list[Change]:
    """Return changes for a run that does not fit: first those that make it fit, then those that save most."""
    helpful = []
    for keys in _candidates(plan):
        config: Any = plan.config
        for key, value in keys.items():
            config = _with(config, key, value)
        try:
            changed = make_plan(config, plan.devices, plan.memory, plan.prompt_tokens)
        except RL4LLMError:  # the change is not possible with this configuration
            continue
        if changed.fits or changed.peak.total <= WORTH * plan.peak.total:
            words = tuple(f"{key}={str(value).lower()}" for key, value in keys.items())
            helpful.append(Change(words, changed.peak.total, changed.fits))
    return sorted(helpful, key=lambda change: (not change.fits, change.peak))


def _candidates(plan: RunPlan) -> Iterator[dict[str, Any]]:
    """Yield values of keys that the configuration may change; first those that change the results least."""
    config, counts = plan.config, plan.counts
    checkpointing = {} if config.model.gradient_checkpointing else {"model.gradient_checkpointing": True}
    if checkpointing:
        yield checkpointing
    smaller = max(counts.longest, counts.padded // 2)
    if smaller < counts.padded:
        yield {"training.max_tokens_per_batch": smaller}
        if checkpointing:
            yield {**checkpointing, "training.max_tokens_per_batch": smaller}
    rows = min(int(config.inference.get("max_rows", MAX_ROWS)), max(counts.trajectories, counts.held_out))
    if config.inference["name"] == "local" and rows > 8:
        yield {"inference.max_rows": rows // 2}
    yield from _shared_out(plan)
    if config.model.vision == "train":
        yield {"model.vision": "frozen"}
    if not config.model.lora.rank and config.training.lr:
        yield {"model.lora.rank": 16, "training.lr": float(f"{FASTER * config.training.lr:.3g}")}
    yield from _fewer_bits(config.model)


def _fewer_bits(model: Any) -> Iterator[dict[str, Any]]:
    if model.lora.rank and model.quantize == "none":
        yield {"model.quantize": "nf4"}
    if model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}


def _shared_out(plan: RunPlan) -> Iterator[dict[str, Any]]:
    """Yield changes that shard the model over several devices, or offload to the CPU."""
    backend, several, gpu = plan.config.backend, plan.devices > 1, plan.device != "cpu"
    if several and backend["name"] == "torch" and backend.get("shard") != "fsdp2":
        yield {"backend.shard": "fsdp2"}
    if several and backend["name"] == "deepspeed" and backend.get("zero_stage") != 3:
        yield {"backend.zero_stage": 3}
    if gpu and backend["name"] == "deepspeed" and not backend.get("offload_optimizer"):
        yield {"backend.offload_optimizer": True}
    if gpu and several and backend.get("shard") == "fsdp2" and not backend.get("cpu_offload"):
        yield {"backend.cpu_offload": True}


def _with(owner: Any, key: str, value: Any) -> Any:
    """Return a section with another value at a dotted key."""
    name, _, rest = key.partition(".")
    if rest:
        value = _with(getattr(owner, name), rest, value)
    return {**owner, name: value} if isinstance(owner, Mapping) else replace(owner, **{name: value})
