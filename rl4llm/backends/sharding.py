"""How ranks train one model together: torch's DistributedDataParallel and FSDP2 (`fully_shard`).

Either averages gradients over the ranks, while a step's loss is the sum over them; `gradient_scale` makes up for that.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from rl4llm.backends.runner import TokenNumbers
from rl4llm.backends.torch_backend import Alone
from rl4llm.core.types import TrainBatch
from rl4llm.runtime.ranks import Ranks


class Replicated(Alone):
    """DistributedDataParallel: every rank has all of the model; gradients meet in the last backward pass of a step.

    Parameters that do not train are no part of it, and every other one takes part in every pass. It would add up
    gradients of 16 bits in 16 bits. Those of such a model are therefore added up in float32, and meet after that pass.
    """

    waits = True
    shares_frozen = False

    def __init__(
        self, module: TokenNumbers, ranks: Ranks, device: torch.device, *, cpu_offload: bool = False
    ):
        super().__init__(module, ranks, device)
        self.gradient_scale = float(ranks.size)
        module.always_runs = True
        self._ddp: DistributedDataParallel | None = None
        if _trains_16_bits(module):
            _bring(module, ranks, device)
            return
        with warnings.catch_warnings():  # the new name of the first option does not exist in every version
            warnings.simplefilter("ignore", FutureWarning)
            # Buffers are constants here. Gradients that are views of what is sent need no memory of their own.
            self._ddp = DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)

    def numbers(self, batch: TrainBatch, *how: Any) -> tuple[Any, ...]:
        run = self._ddp if self._ddp is not None and torch.is_grad_enabled() else self.module
        outputs: tuple[Any, ...] = run(batch, *how)
        return outputs

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    def meet(self, stepped: Iterable[torch.nn.Parameter]) -> None:
        if self._ddp is not None:
            return
        parameters = list(stepped)
        for parameter in parameters:  # what no token of this rank used counts too
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for sent in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            sent.wait()
        torch._foreach_div_(gradients, self.gradient_scale)


class Sharded(Alone):
    """FSDP2: of every parameter, its gradient and its moments, each rank holds a part; layers are put together while they
    run. Gradients meet in every backward pass, so that none is ever held whole.

    Under autocast the layers are put together in its dtype; embeddings, the output layer and heads in their own.

    The module may lie in the memory of the CPU, with its numbers on the first rank only: layer by layer they come to the
    device, where the others get theirs, and each rank keeps its part before the next one comes.
    """

    waits = True
    offloads = True

    def __init__(
        self, module: TokenNumbers, ranks: Ranks, device: torch.device, *, cpu_offload: bool = False
    ):
        super().__init__(module, ranks, device)
        self.gradient_scale = float(ranks.size)
        module.always_runs = True
        offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if cpu_offload else OffloadPolicy()
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (ranks.size,)),
            "offload_policy": offload,
        }
        # Hidden states between layers keep their dtype, as they do under autocast. Ranks add up in float32.
        precision = partial(MixedPrecisionPolicy, reduce_dtype=torch.float32, cast_forward_inputs=False)
        if _trains_16_bits(module):
            options["mp_policy"] = precision()
        of_layers = options | ({"mp_policy": precision(module.autocast)} if module.autocast else {})
        for layer in _layers(module):
            _bring(layer, ranks, device)
            fully_shard(layer, **of_layers)
        # The value head may have another dtype than the model, which one group cannot have.
        if module.value_head is not None:
            _bring(module.value_head, ranks, device)
            fully_shard(module.value_head, **options)
        _bring(module, ranks, device)
        self._sharded = fully_shard(module, **options)

    def numbers(self, batch: TrainBatch, *how: Any) -> tuple[Any, ...]:
        outputs = self.module(batch, *how)
        if not torch.is_grad_enabled():
            self._sharded.reshard()  # FSDP2 keeps what is outside the layers for a backward pass, which does not come
        return outputs


def _trains_16_bits(module: torch.nn.Module) -> bool:
    return any(each.requires_grad and each.dtype.itemsize < 4 for each in module.parameters())


def _bring(module: torch.nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Move what is not sharded yet of a module to the device, and give it the numbers of the first rank."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
            ranks.spread(tensor.data)


def _layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost layers that transformers checkpoints one at a time. FSDP2 must shard them before the module."""
    layers: dict[str, torch.nn.Module] = {}
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in layers)
        if isinstance(child, GradientCheckpointingLayer) and not inside:
            layers[name] = child
    return list(layers.values())
