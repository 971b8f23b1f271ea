"""One model on one rank or many: the policy or the critic, its optimizer, and one number per token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl4llm.backends.heads import ValueHead
from rl4llm.backends.model_backend import FORMAT, MOMENTS, STATE, WEIGHTS, ModelBackend, gathered, part_of
from rl4llm.backends.optimizer import Optimizer, OptimizerOptions
from rl4llm.backends.runner import TokenNumbers, nothing_of
from rl4llm.core.base_backend import BaseAdapter, Head, TokenLosses, TokenMeasures, of_batch
from rl4llm.core.errors import ConfigError
from rl4llm.core.model_memory import FP32, ModelMemory, ModelShape, Precision
from rl4llm.core.registry import load
from rl4llm.core.types import TrainBatch
from rl4llm.core.weights import TensorSpec
from rl4llm.runs.tensor_file import TensorFile
from rl4llm.runtime import devices
from rl4llm.runtime.ranks import Ranks, put, whole

if TYPE_CHECKING:
    from rl4llm.backends.lora import LoraAdapter


class Alone:
    """One rank has all of the model and trains it, or does not train it at all."""

    gradient_scale = 1.0
    waits = False  # whether a gradient pass needs every rank
    shares_frozen = True  # whether it also shares a model that does not train
    offloads = False  # whether it can keep the model in the memory of the CPU

    def __init__(
        self, module: TokenNumbers, ranks: Ranks, device: torch.device, *, cpu_offload: bool = False
    ):
        self.module = module

    def numbers(self, batch: TrainBatch, *how: Any) -> tuple[Any, ...]:
        """Run one pass of the module, with a gradient where torch's is enabled."""
        outputs: tuple[Any, ...] = self.module(batch, *how)
        return outputs

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Enclose a forward and its backward pass; `last` is whether it is the last one of an optimizer step."""
        return nullcontext()

    def meet(self, stepped: Iterable[torch.nn.Parameter]) -> None:
        """Average over the ranks the gradients that no backward pass has averaged."""


SHARDS = {
    "none": "rl4llm.backends.torch_backend:Alone",
    "ddp": "rl4llm.backends.sharding:Replicated",
    "fsdp2": "rl4llm.backends.sharding:Sharded",
}


class TorchBackend(ModelBackend):
    """A causal language model on one device, or on one of each rank.

    >>> backend = TorchBackend(load_model("models/tiny"), lr=1e-5, schedule="cosine", total_steps=100)
    >>> for batch in batches:
    ...     backend.forward_backward(batch, algorithm.token_losses)
    >>> backend.optim_step()["grad_norm"]

    `autocast` "bfloat16" runs matrix products in bf16 while weights, gradients and moments keep their own dtype. A model in
    bfloat16 trains through float32 masters of its weights, which a checkpoint holds.

    With a `value_head` it is a critic, and what `forward` and the losses see are values instead of log-probs. With an
    `adapter` only that trains and is saved; `weights` and `export` give the merged model. Further options are those of
    `OptimizerOptions`.

    `ranks` train the model together, each on its own batches, as many as the others: with `shard` "ddp" (the default) each
    has all of the model, with "fsdp2" a part of every tensor. Then every rank must call all methods except `info`,
    `weight_specs`, `write_config` and, unless "fsdp2" is used, `forward`. Only the first one writes files, which
    do not depend on the number of ranks. `cpu_offload` of "fsdp2" keeps parameters, gradients and moments in
    CPU memory and steps them there.

    On a GPU it sets the process's kernels for float32 and attention, see `use_exact_kernels`.

    `device` is where the model trains, by default where it is; under "fsdp2" its parts come there from wherever it is.
    """

    adapter: LoraAdapter | None = None
    takes_low_bits = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        autocast: str = "none",
        value_head: ValueHead | None = None,
        adapter: BaseAdapter | None = None,
        ranks: Ranks | None = None,
        shard: Literal["none", "ddp", "fsdp2"] | None = None,
        cpu_offload: bool = False,
        trains: bool = True,
        device: torch.device | str | None = None,
        **optimizer: Any,
    ):
        if not trains:
            model.requires_grad_(False)
        super().__init__(
            model, ranks=ranks or Ranks(), autocast=autocast, value_head=value_head, device=device
        )
        self.adapter = cast("LoraAdapter | None", adapter)
        shard = shard or ("none" if self._ranks.size == 1 else "ddp")
        self._shard, self._cpu_offload = shard, cpu_offload
        self.whole = self._ranks.size == 1 or shard != "fsdp2"
        self._shared = shared_by(self._module, self._ranks, self.device, shard, cpu_offload)
        self._optimizer = Optimizer(self._named_parameters(), OptimizerOptions(**({"lr": 0.0} | optimizer)))

    @classmethod
    def shares_weights(cls, ranks: Ranks, options: Mapping[str, Any]) -> bool:
        return ranks.size > 1 and options.get("shard") == "fsdp2"

    @classmethod
    def memory(
        cls,
        shape: ModelShape,
        precision: Precision,
        options: Mapping[str, Any],
        ranks: int = 1,
        *,
        trains: bool = True,
    ) -> ModelMemory:
        whole = super().memory(shape, precision, options, ranks, trains=trains)
        if ranks == 1:
            return whole
        if options.get("shard") != "fsdp2":
            if precision.weights < FP32 and not shape.adapter:
                return whole  # the masters have the gradients
            # DDP's buckets, whose slices are the gradients, exist from the start to the end of a run.
            return replace(whole, gradients=0, buckets=whole.gradients)
        sizes = {"weights": whole.weights, "gradients": whole.gradients, "optimizer": whole.optimizer}
        device, host = {name: part_of(size, ranks) for name, size in sizes.items()}, 0
        if options.get("cpu_offload"):
            device, host = dict.fromkeys(sizes, 0), sum(device.values())
        together = gathered(shape, precision, trains=trains)
        # FSDP2 casts what it puts together
        return replace(whole, **device, casts=0, gathered=together, host=host)

    def _pass(self, batch: TrainBatch, *how: Any) -> tuple[Any, ...]:
        return self._shared.numbers(batch.to(self.device), *how)

    def forward_backward(
        self,
        batch: TrainBatch,
        token_losses: TokenLosses,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        measures: TokenMeasures | None = None,
        head: Head | None = None,
        last: bool = True,
    ) -> dict[str, float]:
        batch = batch.to(self.device)
        with self._shared.accumulating(last):
            numbers_BT, entropy_BT, *more = self._shared.numbers(batch, temperature, entropy, head)
            if more:
                batch.ref_divergence_BT = more[0]
            losses_BT, metrics = token_losses(batch, numbers_BT, entropy_BT)
            if measures is not None:
                metrics = metrics | measures(batch, numbers_BT, metrics)
            loss = (losses_BT * batch.weights_BT).sum()
            if torch.is_grad_enabled():
                # Ranks that wait for each other all run a backward pass; a loss that depends on nothing adds exactly 0.
                if self._shared.waits:
                    (nothing_of(numbers_BT) + loss * self._shared.gradient_scale).backward()
                elif loss.requires_grad:
                    loss.backward()
                if last:
                    self._shared.meet(self.stepped.values())
        return of_batch(loss.detach(), metrics, batch)

    @property
    def stepped(self) -> dict[str, torch.nn.Parameter]:
        """Return by name what has the gradients and takes the steps: parameters, or their float32 masters."""
        return self._optimizer.stepped

    @property
    def optimizer(self) -> Optimizer:
        """Return what takes the steps."""
        return self._optimizer

    def optim_step(self) -> dict[str, float]:
        return self._optimizer.step()

    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        parameters = (
            self.model.named_parameters() if self.adapter is None else self.adapter.merged_parameters()
        )
        yield from ((name, whole(tensor)) for name, tensor in parameters)
        yield from self._buffers()

    @torch.no_grad()
    def take_weights(self, weights: Iterator[tuple[str, Tensor]], rate: float = 1.0) -> None:
        tensors = {**dict(self.model.named_parameters()), **dict(self._buffers())}
        for name, tensor in weights:
            if rate < 1:
                before = whole(tensors[name])
                tensor = before.lerp(tensor.to(before), rate)
            self._put(name, tensors[name], tensor)

    def _own_specs(self) -> list[TensorSpec]:
        parameters = self.model.named_parameters() if self.adapter is None else self.adapter.base_parameters()
        return [TensorSpec.of(name, tensor) for name, tensor in (*parameters, *self._buffers())]

    def save(self, directory: Path) -> dict[str, str]:
        moments, steps = self._optimizer.state()
        state = {"format": FORMAT, "step": self._optimizer.step_number, "parameter_steps": steps}
        if self.adapter is not None:
            state["base"] = self.adapter.base_digest()
        tensors = self._tensors() | self._optimizer.masters
        hashes = self._write_own(directory / WEIGHTS, tensors) | self._write_own(directory / MOMENTS, moments)
        self._on_first(lambda: (directory / STATE).write_text(json.dumps(state, indent=1)))
        return hashes

    def load(self, directory: Path) -> None:
        """Read back what `save` wrote, into the tensors that are there, so that whoever shares them sees it too."""
        if self.adapter is not None:
            self.adapter.base_digest()  # for which every rank is needed
        weights, moments, state = self._agreed(lambda: self._checked(directory))
        self._optimizer.restore(moments, state["parameter_steps"], state["step"])
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                self._put(name, tensor, weights[name])

    def offload(self) -> None:
        self._move("cpu")

    def onload(self) -> None:
        self._move(self.device)

    def _put(self, name: str, own: Tensor, tensor: Tensor) -> None:
        """Write a whole tensor into a parameter and its master, or into a buffer."""
        put(own, tensor)
        if name in self._optimizer.masters:
            put(self._optimizer.masters[name], tensor)

    def _checked(self, directory: Path) -> tuple[TensorFile, TensorFile, dict[str, Any]]:
        weights, moments, state = super()._checked(directory)
        self._optimizer.check(moments, state["parameter_steps"])
        return weights, moments, state

    def _sharing(self) -> str:
        return f"{self._ranks.size} ({self._shard})" if self._ranks.size > 1 else "1"

    def _wholes(self, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return ((name, whole(tensor)) for name, tensor in named.items())

    def _move(self, device: torch.device | str) -> None:
        if self.device.type == "cpu" or self._cpu_offload:
            return
        self._optimizer.move(self._module, torch.device(device))
        devices.call(self.device, "empty_cache")


def shared_by(
    module: TokenNumbers, ranks: Ranks, device: torch.device, shard: str, cpu_offload: bool
) -> Alone:
    """Return the module ready for training by these ranks; one rank never shards."""
    kind: type[Alone] = load(SHARDS[shard])
    if ranks.size > 1 and kind is Alone:
        raise ConfigError(
            f"backend.shard='none' is not accepted for {ranks.size} ranks: their models would diverge. Use ddp or fsdp2."
        )
    if cpu_offload and (not kind.offloads or ranks.size == 1):
        raise ConfigError(
            "backend.cpu_offload=true has no effect here: it requires backend.shard=fsdp2 and two ranks or more."
        )
    trains = any(parameter.requires_grad for parameter in module.parameters())
    if ranks.size == 1 or not (trains or kind.shares_frozen):
        kind = Alone
    return kind(module, ranks, device, cpu_offload=cpu_offload)
