"""AdamW with clipping and a schedule; its whole state can be saved and restored bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl4llm.core.errors import CheckpointError, ConfigError
from rl4llm.core.registry import Registry
from rl4llm.core.schema import Beta, Natural, NonNegative, check_fields
from rl4llm.runtime import devices
from rl4llm.runtime.quantized import BLOCK, SMALL, adamw8bit
from rl4llm.runtime.ranks import part, part_like

MOMENTS = ("exp_avg", "exp_avg_sq")
QUANTIZED = ("state1", "state2", "absmax1", "absmax2")  # bitsandbytes' moments, then scales of their blocks
SAMPLED = 256  # weights of each matrix: the begin of its first row, which the first rank has in any case

# share of the way from the end of the warm-up (0) to the last step (1) -> factor of the learning rate
SCHEDULES: Registry[Callable[[float], float]] = Registry("training.schedule")
SCHEDULES.register("constant")(lambda share: 1.0)
SCHEDULES.register("linear")(lambda share: 1.0 - share)
SCHEDULES.register("cosine")(lambda share: (1 + math.cos(math.pi * share)) / 2)


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """`weight_decay` applies to matrices only. `max_grad_norm` 0 never clips. Steps are optimizer steps."""

    lr: NonNegative
    weight_decay: NonNegative = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: NonNegative = 1.0
    schedule: str = "constant"
    warmup_steps: Natural = 0
    total_steps: int | None = None
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        SCHEDULES[self.schedule]
        check_fields(self, "training")
        if len(self.betas) != 2:
            raise ConfigError(f"training.betas={self.betas!r} is not accepted: two numbers.")
        if self.schedule != "constant" and not self.total_steps:
            raise ConfigError(
                f"training.schedule={self.schedule!r} requires total_steps, the step at which it reaches 0."
            )

    def lr_at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, from 0. The warm-up rises from lr / warmup_steps to lr."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        decay_steps = max(1, (self.total_steps or 0) - self.warmup_steps)
        return self.lr * SCHEDULES[self.schedule](min(1.0, (step - self.warmup_steps) / decay_steps))


class Optimizer:
    """Steps the parameters that need gradients; `parameters` is by name.

    A parameter of 16 bits has a float32 copy in `masters`, which takes the steps, so that no small one is rounded away
    (Micikevicius et al. 2018, section 3.1). After each step the parameter is the rounded master. Whoever writes into such a
    parameter writes into its master too. Each backward pass adds the parameter's gradient to the master's, in float32: in 16
    bits the sum of 1,000 micro-batches loses a quarter. Without `masters` whoever takes the steps must keep them and add
    up the gradients, as DeepSpeed does.

    Where parameters are sharded, so are gradients, masters and moments, and every method but `move` needs every rank.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], options: OptimizerOptions, *, masters: bool = True
    ):
        self.options = options
        self.parameters = {
            name: parameter for name, parameter in parameters.items() if parameter.requires_grad
        }
        self.masters = {
            name: nn.Parameter(parameter.detach().float())
            for name, parameter in self.parameters.items()
            if masters and parameter.dtype.itemsize < 4
        }
        for name, master in self.masters.items():
            self.parameters[name].register_post_accumulate_grad_hook(partial(_add_to, master))
        self.stepped = self.parameters | self.masters  # what has gradients and takes the steps
        self.step_number = 0  # of optimizer steps taken
        matrices = [parameter for parameter in self.stepped.values() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.stepped.values() if parameter.ndim <= 1]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((matrices, options.weight_decay), (vectors, 0.0))
            if params
        ]
        groups = groups or [{"params": []}]  # a model that never trains
        self.adam = _adam(groups, options, self.stepped.values())

    def step(self) -> dict[str, float]:
        """Clip, step, zero the gradients; non-finite gradients are discarded and counted as "skipped"."""
        lr = self.options.lr_at(self.step_number)
        gradients = [parameter.grad for parameter in self.stepped.values() if parameter.grad is not None]
        norm = _norm(gradients)
        metrics = {"grad_norm": norm.item(), "lr": lr}
        if math.isfinite(metrics["grad_norm"]):
            if 0 < self.options.max_grad_norm < metrics["grad_norm"]:
                scale = self.options.max_grad_norm / (metrics["grad_norm"] + 1e-6)
                torch._foreach_mul_([part(gradient) for gradient in gradients], scale)
            for group in self.adam.param_groups:
                group["lr"] = lr
            before = self._sample()
            self.adam.step()
            change, size = (self._sample() - before).norm(), before.norm()
            metrics["update_ratio"] = (change / size).nan_to_num(posinf=0.0).item()  # nothing trains: 0 / 0
            self._round()
            self.step_number += 1
        else:
            metrics["skipped"] = 1.0
        self.adam.zero_grad(set_to_none=True)
        return metrics

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return the moments by name, and how many steps each parameter has taken."""
        states = {name: self.adam.state[p] for name, p in self.stepped.items() if self.adam.state.get(p)}
        moments = {f"{name}.{key}": states[name][key] for name in states for key in self._shapes(name)}
        return moments, {name: int(state["step"]) for name, state in states.items()}

    def check(self, moments: Mapping[str, Tensor], steps: Mapping[str, int]) -> None:
        """Raise CheckpointError unless these are the moments and steps of these parameters."""
        for name in steps:
            expected = self._shapes(name) if name in self.parameters else {"": None}
            stored = {key: moments[place].shape for key in expected if (place := f"{name}.{key}") in moments}
            if stored != expected:
                raise CheckpointError(
                    f"The optimizer state does not fit {name}. It belongs to another model."
                )

    def restore(self, moments: Mapping[str, Tensor], steps: Mapping[str, int], step_number: int) -> None:
        """Restore what `state` returned, as whole tensors; this rank keeps its part of each moment.

        Raise CheckpointError when it belongs to other parameters.
        """
        self.check(moments, steps)
        self.adam.state.clear()
        for name, step in steps.items():
            parameter = self.stepped[name]
            if self.options.optimizer != "adamw":
                self._restore_quantized(name, moments, step)
                continue
            self.adam.state[parameter] = {
                "step": torch.tensor(float(step), device=parameter.device),
                **{
                    moment: part_like(moments[f"{name}.{moment}"].to(parameter.dtype), parameter)
                    for moment in MOMENTS
                },
            }
        self.step_number = step_number

    def move(self, module: nn.Module, device: torch.device) -> None:
        """Move the module whose parameters it steps, masters and moments; what leaves a GPU waits in pinned memory."""
        moved = partial(_moved, device=device)
        for each in (module, nn.ParameterList(self.masters.values())):
            each._apply(moved)
        for state in self.adam.state.values():
            here = {name: item for name, item in state.items() if isinstance(item, Tensor)}
            # bitsandbytes moves by itself what it pages
            state.update({name: moved(item) for name, item in here.items() if not hasattr(item, "is_paged")})
        devices.call(devices.accelerator(), "synchronize")

    def _shapes(self, name: str) -> dict[str, torch.Size]:
        """Return the shapes of a parameter's moments, by their keys."""
        shape = self.parameters[name].shape
        if self.options.optimizer == "adamw":
            return dict.fromkeys(MOMENTS, shape)
        shapes = dict.fromkeys(QUANTIZED[:2], shape)
        if shape.numel() >= SMALL:
            shapes |= dict.fromkeys(QUANTIZED[2:], torch.Size([-(-shape.numel() // BLOCK)]))
        return shapes

    def _restore_quantized(self, name: str, moments: Mapping[str, Tensor], step: int) -> None:
        parameter = self.stepped[name]
        self.adam.init_state(self.adam.param_groups[0], parameter, 0, 0)  # its memory may be paged
        state = self.adam.state[parameter]
        state["step"] = step
        for key in self._shapes(name):
            state[key].copy_(moments[f"{name}.{key}"])

    @torch.no_grad()
    def _sample(self) -> Tensor:
        """Return a copy of a few weights of each matrix."""
        parts = map(part, self.stepped.values())
        rows = [own[(0,) * (own.ndim - 1)][:SAMPLED] for own in parts if own.ndim > 1 and len(own)]
        return torch.cat(rows).float() if rows else torch.zeros(0)

    @torch.no_grad()
    def _round(self) -> None:
        for name, master in self.masters.items():
            part(self.parameters[name]).copy_(part(master))


def _adam(groups: list[dict[str, Any]], options: OptimizerOptions, stepped: Iterable[Tensor]) -> Any:
    """Return AdamW, with moments in the parameters' dtype or in 8 bits."""
    numbers: dict[str, Any] = {"lr": options.lr, "betas": options.betas, "eps": options.eps}
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, **numbers, fused=True)
    if any(isinstance(parameter, DTensor) for parameter in stepped):
        raise ConfigError(
            f"training.optimizer={options.optimizer} takes no sharded weights. Use backend.shard=ddp."
        )
    return adamw8bit(groups, paged=options.optimizer.startswith("paged"), **numbers)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor's copy on the device. torch keeps the pinned memory of the host for the next time."""
    if device.type == "cpu" and tensor.device.type != "cpu" and not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True)


def _add_to(master: nn.Parameter, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None  # autograd calls this after it has written one
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad += gradient


def _norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients together; where they are sharded, the ranks exchange one number."""
    gradients = list(gradients)
    if not gradients:
        return torch.zeros(())
    norm = torch.nn.utils.get_total_norm([part(gradient) for gradient in gradients])
    if isinstance(gradients[0], DTensor):
        squared = norm.double().square()
        dist.all_reduce(squared, group=gradients[0].device_mesh.get_group())
        norm = squared.sqrt()
    return norm
