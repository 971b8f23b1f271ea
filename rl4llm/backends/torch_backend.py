"""One model on one rank or many: the policy or the critic, its optimizer, and one number per token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl4llm.backends.dtensor import put, whole
from rl4llm.backends.heads import ValueHead
from rl4llm.backends.lora import LoraAdapter
from rl4llm.backends.model_backend import FORMAT, MOMENTS, STATE, WEIGHTS, ModelBackend, reduced
from rl4llm.backends.optimizer import Optimizer, OptimizerOptions
from rl4llm.backends.sharding import shared_by
from rl4llm.backends.token_numbers import nothing_of
from rl4llm.core.base_backend import TokenLosses
from rl4llm.core.ranks import Ranks
from rl4llm.core.tensor_file import TensorFile
from rl4llm.core.types import TensorSpec, TrainBatch


class TorchBackend(ModelBackend):
    """A causal language model on one device, or on one of each rank.

    >>> backend = TorchBackend(load_model("models/tiny"), lr=1e-5, schedule="cosine", total_steps=100)
    >>> for batch in batches:
    ...     backend.forward_backward(batch, algorithm.token_losses)
    >>> backend.optim_step()["grad_norm"]

    `autocast` "bfloat16" runs matrix products in bf16 while weights, gradients and moments keep their own dtype. With a
    `value_head` it is a critic, and what `forward` and the losses see are values instead of log-probs. With an `adapter`
    only that trains and is saved; `weights` and `export` give the merged model. Further options are those of
    `OptimizerOptions`.

    `ranks` train the model together, each on its own batches, as many as the others: with `shard` "ddp" (the default) each
    has all of the model, with "fsdp2" a part of every tensor. Then all methods but `info`, `weight_specs`, `write_config`
    and, but for "fsdp2", `forward` need every rank, and only the first one writes files, which are the same for any number
    of ranks. `cpu_offload` of "fsdp2" keeps parameters, gradients and moments in the memory of the CPU and steps them there.

    `device` is where the model trains, by default where it is; under "fsdp2" its parts come there from wherever it is.
    """

    adapter: LoraAdapter | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        autocast: str = "none",
        value_head: ValueHead | None = None,
        adapter: LoraAdapter | None = None,
        ranks: Ranks | None = None,
        shard: str | None = None,
        cpu_offload: bool = False,
        trains: bool = True,
        device: torch.device | str | None = None,
        **optimizer: Any,
    ):
        if not trains:
            model.requires_grad_(False)
        super().__init__(model, ranks=ranks or Ranks(), autocast=autocast, value_head=value_head, device=device)
        self.adapter = adapter
        shard = shard or ("none" if self._ranks.size == 1 else "ddp")
        self._shard, self._cpu_offload = shard, cpu_offload
        self.whole = self._ranks.size == 1 or shard != "fsdp2"
        self._shared = shared_by(self._module, self._ranks, self.device, shard, cpu_offload)
        self._optimizer = Optimizer(self._named_parameters(), OptimizerOptions(**({"lr": 0.0} | optimizer)))

    @classmethod
    def shares_weights(cls, ranks: Ranks, options: Mapping[str, Any]) -> bool:
        return ranks.size > 1 and options.get("shard") == "fsdp2"

    @torch.no_grad()
    def forward(self, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
        return self._shared.numbers(batch.to(self.device), temperature, entropy=False)[0]

    def forward_backward(
        self,
        batch: TrainBatch,
        token_losses: TokenLosses,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        last: bool = True,
    ) -> dict[str, float]:
        batch = batch.to(self.device)
        with self._shared.accumulating(last):
            numbers_BT, entropy_BT = self._shared.numbers(batch, temperature, entropy)
            losses_BT, metrics = token_losses(batch, numbers_BT, entropy_BT)
            loss = (losses_BT * batch.weights_BT).sum()
            if torch.is_grad_enabled():
                self._backward(loss, numbers_BT)
        return reduced(loss.detach(), metrics, batch)

    def optim_step(self) -> dict[str, float]:
        return self._optimizer.step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        parameters = self.model.named_parameters() if self.adapter is None else self.adapter.merged_parameters()
        yield from ((name, whole(tensor)) for name, tensor in parameters)
        yield from self._buffers()

    @torch.no_grad()
    def take_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        own = {**dict(self.model.named_parameters()), **dict(self._buffers())}
        for name, tensor in weights:
            put(own[name], tensor)

    def weight_specs(self) -> list[TensorSpec]:
        parameters = self.model.named_parameters() if self.adapter is None else self.adapter.base_parameters()
        return [TensorSpec.of(name, tensor) for name, tensor in (*parameters, *self._buffers())]

    def save(self, directory: Path) -> dict[str, str]:
        moments, steps = self._optimizer.state()
        state = {"format": FORMAT, "step": self._optimizer.step_number, "parameter_steps": steps}
        if self.adapter is not None:
            state["base"] = self.adapter.base_digest()
        hashes = self._write_own(directory / WEIGHTS, self._tensors()) | self._write_own(directory / MOMENTS, moments)
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
                put(tensor, weights[name])

    def offload(self) -> None:
        self._move("cpu")

    def onload(self) -> None:
        self._move(self.device)

    def _backward(self, loss: Tensor, numbers_BT: Tensor) -> None:
        """Ranks that wait for each other all run a backward pass; a loss that depends on nothing adds exactly 0."""
        if self._shared.waits:
            (nothing_of(numbers_BT) + loss * self._shared.gradient_scale).backward()
        elif loss.requires_grad:
            loss.backward()

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
        self._module.to(device)
        self._optimizer.to(device)
        torch.cuda.empty_cache()
