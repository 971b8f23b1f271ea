"""A configuration's plan: counts, memory by phase, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil

from rl4llm.backends.models import empty_model, has_4_bits
from rl4llm.compose.choices import check_choices
from rl4llm.compose.setup import Machine, Setup, demand_device
from rl4llm.compose.supervised import with_steps
from rl4llm.config import Config
from rl4llm.core.model_memory import ONE_SEQUENCE, Precision
from rl4llm.extensions.inspect.plan.counts import Counts, count
from rl4llm.extensions.inspect.plan.memory import Memory, Models, Phase
from rl4llm.extensions.inspect.plan.shape import read_shape, read_tower, shape_of
from rl4llm.inference.paths import context_limit
from rl4llm.runtime import devices
from rl4llm.runtime.gpus import GPU

RESERVE = 0.1
"""Share of a GPU that is left free for CUDA's context and the gaps between blocks, which are not counted."""

SERVER_SHARE = 0.7
"""Share of a GPU for a server beside the trainer, as `scripts/train_cohost.sh` starts it."""

BRING_MODELS = {"reward_model": "auto", "model": "cpu"}
"""Rewards and opponents that run the model at their `path` in this process, and the device where they do by default."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run does in a step, and its memory. `devices` are ranks, one on each; `memory` is the bytes of one device.

    `host` is what offload keeps for each of them in the machine's memory, and `host_memory` what this machine has of it;
    None in a plan for another machine.
    """

    config: Config
    counts: Counts
    models: Models
    phases: list[Phase]
    devices: int
    machine: Machine
    memory: int
    host: Phase
    host_memory: int | None
    prompt_tokens: int | None = None  # those given instead of rows

    @property
    def device(self) -> str:
        return self.machine.device

    @property
    def peak(self) -> Phase:
        """The phase that takes most memory."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def room(self) -> int:
        """Bytes of a device that a phase may take; on a CPU, all ranks share the memory of the machine."""
        return int(self.memory * (1 - RESERVE)) if self.machine.on_gpu else self.memory // self.devices

    @property
    def fits(self) -> bool:
        """Whether every phase fits, and a server on the same device can run a sequence."""
        return self.peak.total <= self.room and self.served != 0

    @property
    def served(self) -> int | None:
        """How many of the longest sequences fit the cache of a server on the same device; None without such a server."""
        rollout = next((phase.parts for phase in self.phases if ONE_SEQUENCE in phase.parts), None)
        if rollout is None:
            return None
        weights = sum(rollout.values()) - rollout[ONE_SEQUENCE]
        return max(0, int(self.memory * SERVER_SHARE) - weights) // rollout[ONE_SEQUENCE]


def on_target(config: Config, memory: int | None) -> Config:
    """Return the configuration for the device that has `memory` bytes: a GPU, unless the configuration names one."""
    if memory is None or config.model.device != "auto":
        return config
    return replace(config, model=replace(config.model, device=GPU))


def make_plan(
    config: Config, devices: int = 1, memory: int | None = None, prompt_tokens: int | None = None
) -> RunPlan:
    """Return the plan for `devices` devices of `memory` bytes each, by default those of this machine.

    Reads only configs, the tokenizer and the data, and raises the errors that training would. With `prompt_tokens` it reads
    only configs.
    """
    machine = Machine.of(config)
    setup = Setup.of(config, machine=machine)
    check_choices(config, setup.given, setup.needs)
    policy = empty_model(config.model.path)
    context_length, _ = context_limit(policy, config.inference.get("context_length"))
    counts = count(setup, context_length, prompt_tokens)
    models = _models(setup, policy)
    estimate = Memory(setup, counts, models, devices)
    return RunPlan(
        config=with_steps(setup.config, counts.rows, devices)[0],
        counts=counts,
        models=models,
        phases=estimate.phases(),
        devices=devices,
        machine=machine,
        memory=_memory(machine.device) if memory is None else memory,
        host=estimate.on_host(),
        host_memory=psutil.virtual_memory().total if memory is None else None,
        prompt_tokens=prompt_tokens,
    )


def _models(setup: Setup, policy: Any) -> Models:
    """Return the sizes of all models in this process, by the rules of `rl4llm.compose.models`."""
    config, needs = setup.config, setup.needs
    lora = config.model.lora
    plain = shape_of(policy)
    nf4 = config.model.quantize != "none" or has_4_bits(config.model.path)
    skips = config.model.quantize_skip if nf4 else None
    trained = shape_of(policy, lora_rank=lora.rank, lora_targets=lora.targets, nf4_skips=skips)
    paths, critic = needs.separate_references(adapter=lora.rank > 0), None
    references = [plain if path is None else read_shape(path) for path in paths]
    if needs.critic is not None:
        critic = plain if needs.critic.path is None else read_shape(needs.critic.path)
    tower = None if config.model.vision == "none" else read_tower(config.model.path)
    return Models(trained, critic, references, _others(setup), tower)


def _others(setup: Setup) -> dict[str, int]:
    """Return the bytes of the models that rewards and opponents load onto the device, by name and path."""
    sizes: dict[str, int] = {}
    for item in judges_and_opponents(setup.config):
        if item.get("name") not in BRING_MODELS or "path" not in item:
            continue
        device = item.get("device", BRING_MODELS[item["name"]])
        if device != "cpu" or not setup.machine.on_gpu:
            number = Precision.of(item.get("dtype", "float32")).weights
            sizes[f"{item['name']} {item['path']}"] = read_shape(item["path"]).parameters * number
    return sizes


def judges_and_opponents(config: Config) -> Iterator[Mapping[str, Any]]:
    """Yield the options of each reward and opponent that has any."""
    for part in config.environments.values():
        opponents = part.env.get("opponents")
        items = (*(part.rewards or ()), *(opponents.values() if isinstance(opponents, Mapping) else ()))
        yield from (item for item in items if isinstance(item, Mapping))


def _memory(device: str) -> int:
    """Return the bytes of one device of this machine."""
    if device == "cpu":
        return psutil.virtual_memory().total
    demand_device(device)
    return devices.properties(device)[1]
