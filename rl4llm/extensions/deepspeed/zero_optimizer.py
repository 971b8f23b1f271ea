"""The optimizer of a DeepSpeed engine: replicated on every rank, sharded, or none.

All kinds have the methods of `NoOptimizer`. `step` takes a step and returns its metrics, `steps` counts those of each
parameter. `moments` and `master` return what a checkpoint stores, whole on the first rank; `check`, `restore` and `put` read
it back. `offload` and `onload` move everything off the device and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl4llm.backends.optimizer import MOMENTS as MOMENT_NAMES
from rl4llm.backends.optimizer import Optimizer
from rl4llm.core.errors import CheckpointError, ConfigError
from rl4llm.core.weights import TensorSpec
from rl4llm.extensions.deepspeed.zero_parts import (
    ZeroPart,
    has_equal_parts,
    padded,
    part_of,
    sent_to_first,
    whole_shape,
)
from rl4llm.runs.tensor_file import TensorFile


class NoOptimizer:
    """For a model that never trains; if every rank has all of it, `module` can leave the device."""

    step_number = 0
    _parameters: Mapping[str, Tensor] = {}

    def __init__(self, module: nn.Module | None, device: torch.device):
        self._module, self._device = module, device

    def step(self) -> dict[str, float]:
        raise ConfigError("A model with trains=False cannot take optimizer steps.")

    def steps(self) -> dict[str, int]:
        return {}

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def moment_specs(self) -> list[TensorSpec]:
        return []

    def master(self, parameter: Tensor) -> Tensor:
        return parameter.detach()

    def check(self, moments: TensorFile, steps: Mapping[str, int]) -> None:
        """Raise CheckpointError unless the moments and steps belong to these parameters."""
        shapes = {name: whole_shape(tensor) for name, tensor in self._parameters.items()}
        for name, moment in product(steps, MOMENT_NAMES):
            key = f"{name}.{moment}"
            if key not in moments or tuple(moments.shape(key)) != shapes.get(name):
                raise CheckpointError(f"The optimizer state does not fit: {key} must be {shapes.get(name)}.")

    def restore(self, moments: TensorFile, steps: Mapping[str, int], step_number: int) -> None:
        """Do nothing: there is no state."""

    def put(self, parameter: Tensor, tensor: Tensor) -> None:
        """Do nothing: there is no copy of the parameter."""

    def offload(self) -> None:
        if self._module is not None:
            self._module.to("cpu")

    def onload(self) -> None:
        if self._module is not None:
            self._module.to(self._device)


class ReplicatedOptimizer(NoOptimizer):
    """Stage 0: every rank has the whole optimizer and steps with the same gradient."""

    def __init__(self, engine: Any, inner: Optimizer, device: torch.device):
        self._engine, self._inner, self._device = engine, inner, device
        self._parameters = inner.parameters

    def step(self) -> dict[str, float]:
        self._engine.buffered_allreduce_fallback()
        metrics = self._inner.step()
        self.step_number = self._inner.step_number
        return metrics

    def restore(self, moments: TensorFile, steps: Mapping[str, int], step_number: int) -> None:
        self._inner.restore(moments, steps, step_number)
        self.step_number = step_number

    def steps(self) -> dict[str, int]:
        return self._inner.state()[1]

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._inner.state()[0].items()

    def moment_specs(self) -> list[TensorSpec]:
        return [TensorSpec.of(name, tensor) for name, tensor in self.moments()]

    def offload(self) -> None:
        self._inner.move(self._engine.module, torch.device("cpu"))

    def onload(self) -> None:
        self._inner.move(self._engine.module, self._device)


class ZeroOptimizer(NoOptimizer):
    """Stages 1 to 3: DeepSpeed has sharded the fp32 parameters and moments over the ranks.

    `inner` created the optimizer, whose parameters are the shards now. `take_no_step` creates moments that do not exist
    yet.
    """

    def __init__(self, engine: Any, inner: Optimizer, deepspeed: Any, take_no_step: Callable[[], None]):
        self._engine, self._deepspeed, self._take_no_step = engine, deepspeed, take_no_step
        self._options, self._parameters, self._adam = inner.options, inner.parameters, inner.adam
        self._device = torch.device(engine.device)
        self._own = {id(parameter): part_of(parameter) for parameter in self._parameters.values()}
        self._parts: dict[int, tuple[ZeroPart, ...]] | None = None  # of all ranks, filled on first use
        self._linked = False  # whether DeepSpeed has located the moments, which it does in its first step
        self._give_moments()

    def step(self) -> dict[str, float]:
        lr = self._options.lr_at(self.step_number)
        self._set_lr(lr)
        self._engine.step()
        self._linked = self._linked or self._engine.was_step_applied()
        metrics = {"grad_norm": float(self._engine.get_global_grad_norm()), "lr": lr}
        if self._engine.was_step_applied():
            self.step_number += 1
        else:
            metrics["skipped"] = 1.0
        return metrics

    def steps(self) -> dict[str, int]:
        return dict.fromkeys(self._parameters, self.step_number) if self.step_number else {}

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.steps():
            for moment in MOMENT_NAMES:
                yield f"{name}.{moment}", self.master(self._parameters[name], moment)

    def moment_specs(self) -> list[TensorSpec]:
        shapes = {name: whole_shape(self._parameters[name]) for name in self.steps()}
        pairs = product(shapes, MOMENT_NAMES)
        return [TensorSpec(f"{name}.{moment}", shapes[name], torch.float32) for name, moment in pairs]

    def restore(self, moments: TensorFile, steps: Mapping[str, int], step_number: int) -> None:
        if not self._linked:
            self._set_lr(0.0)
            self._take_no_step()
            self._linked = True
        for name, parameter in self._parameters.items():
            for moment in MOMENT_NAMES:
                value = moments[f"{name}.{moment}"] if name in steps else torch.zeros(whole_shape(parameter))
                self.put(parameter, value.to(parameter.device), moment)
        for state in self._adam.state.values():
            state["step"].fill_(max(steps.values(), default=0))
        self.step_number = step_number

    def master(self, parameter: Tensor, moment: str | None = None) -> Tensor:
        """Return the fp32 weight or a moment, whole on the first rank and undefined elsewhere.

        Each rank sends its part once; DeepSpeed's method sums whole tensors over all ranks.
        """
        if self._parts is None:
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, list(self._own.values()))
            self._parts = dict(zip(self._own, zip(*ranks, strict=True), strict=True))
        values, parts = self._values(parameter, moment), self._parts[id(parameter)]
        return sent_to_first(values, parts, whole_shape(parameter))

    def put(self, parameter: Any, tensor: Tensor, moment: str | None = None) -> None:
        """Store this rank's part of a whole fp32 weight or moment."""
        part = self._own[id(parameter)]
        values, named = tensor.flatten()[part.start : part.start + part.numel], (moment,) if moment else ()
        if not hasattr(parameter, "ds_id"):
            self._values(parameter, moment).copy_(values)
        elif has_equal_parts(parameter):
            self._access("set_full", moment)(parameter, tensor, *named)
        else:  # for a padded part, the other functions read beyond the end of the tensor
            self._access("set_local", moment)(parameter, padded(parameter, values), *named)

    def offload(self) -> None:
        if self._engine.zero_offload_param() is not None:
            return  # DeepSpeed keeps the weights off the device and moves nothing
        pinned = self._device.type != "cpu"
        if self._engine.zero_optimization_stage() < 3:
            self._engine.offload_states(pin_memory=pinned)
        else:
            kinds = self._deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum
            gradients = [] if self._engine.zero_use_cpu_optimizer() else [kinds.lp_grads]
            include = [kinds.lp_params, *gradients, kinds.contiguous_grad_buffer]
            self._engine.offload_states(include=include, pin_memory=pinned)
            self._move(torch.device("cpu"))

    def onload(self) -> None:
        if self._engine.zero_offload_param() is not None:
            return
        self._engine.reload_states()
        if self._engine.zero_optimization_stage() == 3 and not self._engine.zero_use_cpu_optimizer():
            self._move(self._device)

    def _move(self, device: torch.device) -> None:
        """Move the fp32 weights and moments, which DeepSpeed moves in stage 3 only for its own optimizer."""
        for part in self._engine.optimizer.fp32_partitioned_groups_flat:
            part.data = part.data.to(device)
        for state in self._adam.state.values():
            for name, tensor in state.items():
                state[name] = tensor.to(device)

    def _values(self, parameter: Any, moment: str | None) -> Tensor:
        if hasattr(parameter, "ds_id"):
            return self._access("get_local", moment)(parameter, *((moment,) if moment else ()))
        part = self._own[id(parameter)]
        flat = self._adam.param_groups[part.group]["params"][0]
        values = self._adam.state[flat][moment] if moment else flat.detach()
        return values[part.offset : part.offset + part.numel]

    def _access(self, how: str, moment: str | None) -> Any:
        """Return DeepSpeed's function for a moment, or for the fp32 weight."""
        return getattr(self._deepspeed.utils, f"safe_{how}_{'optimizer_state' if moment else 'fp32_param'}")

    def _give_moments(self) -> None:
        """Create all moments: DeepSpeed looks for them once, in the first step, when only the first group has any."""
        for group in self._adam.param_groups:
            for part in group["params"]:
                moments = {moment: torch.zeros_like(part) for moment in MOMENT_NAMES}
                self._adam.state[part] = {"step": torch.zeros((), device=part.device)} | moments

    def _set_lr(self, lr: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = lr
