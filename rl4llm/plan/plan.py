"""A configuration's plan: counts, memory by phase, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from rl4llm.backends.models import empty_model
from rl4llm.build import build_algorithm
from rl4llm.build.models import demand_device, device_of
from rl4llm.build.options import Given
from rl4llm.build.trainer import check_choices
from rl4llm.config import Config, by_part
from rl4llm.core.base_algorithm import BaseAlgorithm
from rl4llm.inference.paths import context_limit
from rl4llm.plan.counts import Counts, count
from rl4llm.plan.memory import Models, Phase, phases
from rl4llm.plan.shape import read_shape, shape_of

RESERVE = 0.1
"""Share of a GPU that is left free: CUDA's context and the holes between blocks, which no formula here counts."""

BRING_MODELS = ("reward_model", "model")
"""Rewards and opponents that run a model of their `path` in this process."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does in a step, and what it holds. `devices` are ranks, one on each; `memory` is bytes of one device."""

    config: Config
    counts: Counts
    models: Models
    phases: list[Phase]
    devices: int
    device: str
    memory: int

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def room(self) -> int:
        """Bytes of a device that a phase may take; all ranks share the memory of one machine's CPU."""
        return int(self.memory * (1 - RESERVE)) if self.device != "cpu" else self.memory // self.devices

    @property
    def fits(self) -> bool:
        """Whether every phase does."""
        return self.peak.total <= self.room


def make_plan(config: Config, devices: int = 1, memory: int | None = None) -> Plan:
    """The plan of a configuration on so many devices with so many bytes each, by default those of this machine.

    Only configs, the tokenizer and the data are read. Raises what training would for those that cannot be.
    """
    algorithm = build_algorithm(config)
    check_choices(config, Given(), algorithm.needs())
    policy = empty_model(config.model.path)
    counts = count(config, algorithm, _context_length(config, policy))
    models = _models(config, algorithm, policy)
    return Plan(
        config=config,
        counts=counts,
        models=models,
        phases=phases(config, algorithm, counts, models, devices),
        devices=devices,
        device=device_of(config),
        memory=_memory(device_of(config)) if memory is None else memory,
    )


def _context_length(config: Config, model: Any) -> int:
    return context_limit(model, config.inference.get("context_length"))[0]


def _models(config: Config, algorithm: BaseAlgorithm, policy: Any) -> Models:
    """Sizes of all models that will be in this process, by the rules of `rl4llm.build.models`."""
    needs, lora = algorithm.needs(), config.model.lora
    plain = shape_of(policy)
    own = shape_of(policy, lora_rank=lora.rank, lora_targets=lora.targets) if lora.rank else plain
    under_adapter = lora.rank and needs.reference_path is None and not needs.reference_every
    reference = None
    if needs.reference and not under_adapter:
        reference = plain if needs.reference_path is None else read_shape(needs.reference_path)
    critic = None
    if needs.critic is not None:
        critic = plain if needs.critic.path is None else read_shape(needs.critic.path)
    return Models(own, critic, reference, _others(config))


def _others(config: Config) -> dict[str, int]:
    """Bytes of the models that rewards and opponents bring: what has a `path` of a model and runs in this process."""
    found: dict[str, int] = {}
    for part in by_part(config).values():
        opponents = part.env.get("opponents")
        played = opponents.values() if isinstance(opponents, Mapping) else ()
        for item in (*(part.rewards or ()), *played):
            if isinstance(item, Mapping) and item.get("name") in BRING_MODELS and "path" in item:
                numbers = 2 if item.get("dtype", "float32") == "bfloat16" else 4
                found[f"{item['name']} {item['path']}"] = read_shape(item["path"]).parameters * numbers
    return found


def _memory(device: str) -> int:
    """Bytes of one device of this machine."""
    if device == "cpu":
        return psutil.virtual_memory().total
    demand_device(device)
    return torch.cuda.get_device_properties(torch.device(device)).total_memory
