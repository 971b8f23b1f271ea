"""One model on one rank or many: the policy or the critic, its optimizer, and one number per token."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rl4llm.backends.dtensor import put, whole
from rl4llm.backends.heads import VALUE_HEAD_FILE, ValueHead
from rl4llm.backends.lora import WEIGHTS as ADAPTER
from rl4llm.backends.lora import LoraAdapter
from rl4llm.backends.models import without_progress_bars
from rl4llm.backends.optimizer import Optimizer, OptimizerOptions
from rl4llm.backends.sharding import shared_by
from rl4llm.backends.token_numbers import TokenNumbers, nothing_of
from rl4llm.core.base_backend import BaseBackend, TokenLosses, TokenMetrics
from rl4llm.core.errors import CheckpointError, ConfigError, WeightsError, unknown
from rl4llm.core.ranks import Ranks
from rl4llm.core.tensor_file import TensorFile, write_tensors
from rl4llm.core.types import TensorSpec, TrainBatch

WEIGHTS, MOMENTS, STATE = "weights.safetensors", "optimizer.safetensors", "backend.json"
FORMAT = 1
T = TypeVar("T")
VALUE_HEAD = "value_head."
AUTOCAST = {"none": None, "bfloat16": torch.bfloat16}


class TorchBackend(BaseBackend):
    """A causal language model on one device, or on one of each rank.

    >>> backend = TorchBackend(load_model("models/tiny"), lr=1e-5, schedule="cosine", total_steps=100)
    >>> for batch in batches:
    ...     backend.forward_backward(batch, algorithm.token_losses)
    >>> backend.optim_step()["grad_norm"]

    `autocast` "bfloat16" runs matrix products in bf16 while weights, gradients and moments keep their own dtype. With a
    `value_head` it is a critic, and what `forward` and the losses see are values instead of log-probs. With an `adapter`
    only that trains and is saved; `weights` and `export` give the merged model. Further options are those of
    `OptimizerOptions`.

    `ranks` train the model together, each on its own batches, as many as the others: with `shard` "ddp" each has all of
    the model, with "fsdp2" a part of every tensor. Then all methods but `info`, `weight_specs`, `write_config` and, but
    for "fsdp2", `forward` need every rank, and only the first one writes files, which are the same for any number of
    ranks. `cpu_offload` of "fsdp2" keeps parameters, gradients and moments in the memory of the CPU and steps them there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        autocast: str = "none",
        value_head: ValueHead | None = None,
        adapter: LoraAdapter | None = None,
        ranks: Ranks | None = None,
        shard: str = "none",
        cpu_offload: bool = False,
        **optimizer: Any,
    ):
        if autocast not in AUTOCAST:
            raise ConfigError(unknown("model.autocast", autocast, AUTOCAST))
        self.model = model
        self.adapter = adapter
        self.device = next(model.parameters()).device
        self.value_head = None if value_head is None else value_head.to(self.device)
        self._autocast = AUTOCAST[autocast]
        self._ranks = ranks or Ranks()
        self._shard, self._cpu_offload = shard, cpu_offload
        self._module = TokenNumbers(model, self.value_head, self._autocast)
        self._shared = shared_by(self._module, self._ranks, shard, cpu_offload)
        self._optimizer = Optimizer(self._named_parameters(), OptimizerOptions(**optimizer))

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
        return _reduced(loss.detach(), metrics, batch)

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

    def write_config(self, directory: Path) -> None:
        if not self._ranks.is_first:
            return
        self.model.config.save_pretrained(directory)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(directory)

    def save(self, directory: Path) -> None:
        moments, steps = self._optimizer.state()
        state = {"format": FORMAT, "step": self._optimizer.step_number, "parameter_steps": steps}
        if self.adapter is not None:
            state["base"] = self.adapter.base_digest()
        self._write(directory / WEIGHTS, self._tensors())
        self._write(directory / MOMENTS, moments)
        self._on_first(lambda: (directory / STATE).write_text(json.dumps(state, indent=1)))

    def load(self, directory: Path) -> None:
        """Read back what `save` wrote, into the tensors that are there, so that whoever shares them sees it too."""
        base = None if self.adapter is None else self.adapter.base_digest()
        tensors = self._tensors()
        weights, moments, state = self._agreed(lambda: self._checked(directory, tensors, base))
        self._optimizer.restore(moments, state["parameter_steps"], state["step"])
        with torch.no_grad():
            for name, tensor in tensors.items():
                put(tensor, weights[name])

    def write_adapter(self, directory: Path) -> None:
        """Write the adapter alone as an ordinary PEFT directory; raises ConfigError where the whole model trains."""
        if self.adapter is None:
            raise ConfigError("There is no adapter to write, since the whole model trains. Set model.lora.rank, e.g. to 16.")
        self._write(directory / ADAPTER, dict(self.adapter.parameters()))
        self._on_first(lambda: self.adapter.write_config(directory))

    def export(self, directory: Path) -> None:
        tensors = {}  # transformers wants all at once, in the memory of the CPU; other ranks keep none
        for name, tensor in self.weights():
            if self._ranks.is_first:
                tensors[name] = _packed(tensor)
        with without_progress_bars():
            self._on_first(lambda: self.model.save_pretrained(directory, state_dict=tensors))
        if self.value_head is not None:
            self._write(directory / VALUE_HEAD_FILE, dict(self.value_head.named_parameters()))

    def info(self) -> dict[str, Any]:
        parameters = list(self._named_parameters().values())
        return {
            "architecture": type(self.model).__name__,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "autocast": next(name for name, dtype in AUTOCAST.items() if dtype is self._autocast),
            "device": str(self.device),
            "ranks": f"{self._ranks.size} ({self._shard})" if self._ranks.size > 1 else "1",
            "batches as": "one row without padding" if self._module.runner.streams else "padded rows",
            "gradient_checkpointing": any(
                layer.gradient_checkpointing and layer.training
                for layer in self.model.modules()
                if isinstance(layer, GradientCheckpointingLayer)
            ),
        }

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

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """The first rank writes the tensors, one at a time; the others help to make them whole."""
        specs = [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
        wholes = ((name, whole(tensor)) for name, tensor in tensors.items())
        self._on_first(lambda: write_tensors(path, specs, wholes), finish=lambda: deque(wholes, maxlen=0))

    def _on_first(self, write: Callable[[], Any], finish: Callable[[], Any] = lambda: None) -> None:
        """`write` on the first rank, then `finish` on all; what fails there fails on all."""
        problem = None
        try:
            if self._ranks.is_first:
                write()
        except (OSError, SafetensorError, WeightsError) as error:
            problem = error
        finish()  # ranks that wait for each other are not left waiting
        told = self._ranks.share(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        if told is not None:
            raise CheckpointError(f"The first rank could not write: {told}")

    def _agreed(self, read: Callable[[], T]) -> T:
        """What `read` returns, or CheckpointError on every rank when it raises that on any."""
        try:
            found, problem = read(), None
        except CheckpointError as error:
            found, problem = None, error
        failed = self._ranks.largest(int(problem is not None))
        if problem is not None:
            raise problem
        if failed:
            raise CheckpointError("Another rank could not read the checkpoint; its own message says why.")
        return found

    def _checked(
        self, directory: Path, tensors: dict[str, Tensor], base: str | None
    ) -> tuple[TensorFile, TensorFile, dict[str, Any]]:
        """The files of a checkpoint of this model, of which no tensor is read yet."""
        weights, moments, state = _opened(directory)
        _check_names(directory, tensors, weights)
        if base is not None and state.get("base") != base:
            raise CheckpointError(
                f"{directory} holds an adapter that was trained beside another base model than the one in model.path. "
                "Resume with that model, unchanged."
            )
        self._optimizer.check(moments, state["parameter_steps"])
        return weights, moments, state

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        kept = self.model.state_dict(keep_vars=True)
        for name, buffer in self.model.named_buffers():
            if name in kept:
                yield name, buffer.detach()

    def _named_parameters(self) -> dict[str, torch.nn.Parameter]:
        named = dict(self.model.named_parameters())
        if self.value_head is not None:
            named |= {VALUE_HEAD + name: parameter for name, parameter in self.value_head.named_parameters()}
        return named

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """Without an adapter all parameters, even those that a user froze."""
        named = self._named_parameters()
        return named if self.adapter is None else {name: item for name, item in named.items() if item.requires_grad}

    def _tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, as it is here, perhaps sharded."""
        whole_model = dict(self._named_parameters()) | dict(self._buffers()) if self.adapter is None else {}
        return {name: tensor.detach() for name, tensor in (whole_model | self._trained()).items()}

    def _move(self, device: torch.device | str) -> None:
        if self.device.type == "cpu" or self._cpu_offload:
            return
        self._module.to(device)
        self._optimizer.to(device)
        torch.cuda.empty_cache()


def _reduced(loss: Tensor, metrics: TokenMetrics, batch: TrainBatch) -> dict[str, float]:
    """The loss, the number of the policy's tokens, and of each metric the mean over them, or what its name asks for."""
    mask_BT = batch.mask_BT
    tokens = mask_BT.sum()
    values = [loss, tokens]
    for name, metric_BT in metrics.items():
        metric_BT = metric_BT.detach()
        if name.endswith("/max"):
            values.append(metric_BT.masked_fill(~mask_BT, float("-inf")).max())
        elif name.endswith("/weighted"):
            values.append((metric_BT * batch.weights_BT).sum())
        else:
            values.append(metric_BT.masked_fill(~mask_BT, 0.0).sum() / tokens.clamp(min=1))
    names = ["loss", "tokens", *metrics]
    return dict(zip(names, torch.stack([value.double() for value in values]).tolist(), strict=True))


def _packed(tensor: Tensor) -> Tensor:
    """A copy of its own, since safetensors refuses tensors that share storage, and engines fuse weights in place."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _opened(directory: Path) -> tuple[TensorFile, TensorFile, dict[str, Any]]:
    try:
        state = json.loads((directory / STATE).read_text())
        weights, moments = TensorFile(directory / WEIGHTS), TensorFile(directory / MOMENTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"The model state in {directory} cannot be read: {error}. Use an older one.") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{directory / STATE} is not of format {FORMAT}. Resume with the version that wrote it.")
    return weights, moments, state


def _check_names(directory: Path, tensors: dict[str, Tensor], weights: TensorFile) -> None:
    missing, extra = sorted(tensors.keys() - weights.keys()), sorted(weights.keys() - tensors.keys())
    if missing or extra:
        what = f"lacks {', '.join(missing[:3])}" if missing else f"has unknown {', '.join(extra[:3])}"
        raise CheckpointError(f"{directory / WEIGHTS} {what}. It belongs to another model.")
    for name, tensor in tensors.items():
        if weights.shape(name) != tensor.shape:
            raise CheckpointError(
                f"{directory / WEIGHTS}: {name} has shape {tuple(weights.shape(name))}, the model's has "
                f"{tuple(tensor.shape)}. It belongs to another model."
            )
