"""What every backend shares that holds a Hugging Face model: names, files, and ranks that agree on both."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rl4llm.backends.heads import VALUE_HEAD_FILE, ValueHead
from rl4llm.backends.lora import WEIGHTS as ADAPTER
from rl4llm.backends.models import without_progress_bars
from rl4llm.backends.token_numbers import TokenNumbers
from rl4llm.core.base_backend import BaseBackend, TokenMetrics
from rl4llm.core.errors import CheckpointError, ConfigError, WeightsError, unknown
from rl4llm.core.ranks import Ranks
from rl4llm.core.tensor_file import TensorFile, write_tensors
from rl4llm.core.types import TensorSpec, TrainBatch

WEIGHTS, MOMENTS, STATE = "weights.safetensors", "optimizer.safetensors", "backend.json"
FORMAT = 1
VALUE_HEAD = "value_head."
AUTOCAST = {"none": None, "bfloat16": torch.bfloat16}
T = TypeVar("T")


class ModelBackend(BaseBackend):
    """A backend of one model; subclasses say how a tensor is made whole of which ranks hold parts.

    What `save` writes is the same for any number of ranks, however they share the model: `weights.safetensors`,
    `optimizer.safetensors` with the moments, and `backend.json`. All ranks call the methods that read or write, together;
    the first one writes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ranks: Ranks,
        autocast: str,
        value_head: ValueHead | None,
        device: torch.device | str | None,
    ):
        if autocast not in AUTOCAST:
            raise ConfigError(unknown("model.autocast", autocast, AUTOCAST))
        self.model = model
        place = next(model.parameters()).device if device is None else device
        self.device = torch.empty(0, device=place).device  # with its number
        self.value_head = None if value_head is None else value_head.to(self.device)
        self._ranks = ranks
        self._autocast = autocast
        self._module = TokenNumbers(model, self.value_head, AUTOCAST[autocast], ranks)

    def write_config(self, directory: Path) -> None:
        if not self._ranks.is_first:
            return
        self.model.config.save_pretrained(directory)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(directory)

    def write_adapter(self, directory: Path) -> None:
        """Write the adapter alone as an ordinary PEFT directory; raises ConfigError where the whole model trains."""
        adapter = self.adapter
        if adapter is None:
            raise ConfigError("There is no adapter to write, since the whole model trains. Set model.lora.rank, e.g. to 16.")
        self._write(directory / ADAPTER, adapter.specs(), adapter.weights())
        self._on_first(lambda: adapter.write_config(directory))

    def export(self, directory: Path) -> None:
        tensors = {}  # transformers wants all at once, in the memory of the CPU; other ranks keep none
        for name, tensor in self.weights():
            if self._ranks.is_first:
                tensors[name] = _packed(tensor)
        with without_progress_bars():
            self._on_first(lambda: self.model.save_pretrained(directory, state_dict=tensors))
        if self.value_head is not None:
            self._write_own(directory / VALUE_HEAD_FILE, dict(self.value_head.named_parameters()))

    def info(self) -> dict[str, Any]:
        parameters = list(self._named_parameters().values())
        return {
            "architecture": type(self.model).__name__,
            "parameters": sum(self._size(parameter) for parameter in parameters),
            "trainable": sum(self._size(parameter) for parameter in parameters if parameter.requires_grad),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "autocast": self._autocast,
            "device": str(self.device),
            "ranks": self._sharing(),
            "batches as": "one row without padding" if self._module.runner.streams else "padded rows",
            "gradient_checkpointing": any(
                layer.gradient_checkpointing and layer.training
                for layer in self.model.modules()
                if isinstance(layer, GradientCheckpointingLayer)
            ),
        }

    @abstractmethod
    def _sharing(self) -> str:
        """How many ranks there are, and how they share the model."""

    @abstractmethod
    def _wholes(self, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, each made whole when it is asked for."""

    def _spec(self, name: str, tensor: Tensor) -> TensorSpec:
        """Of the whole tensor."""
        return TensorSpec.of(name, tensor)

    def _size(self, tensor: Tensor) -> int:
        return math.prod(self._spec("", tensor).shape)

    def _write_own(self, path: Path, named: Mapping[str, Tensor]) -> dict[str, str]:
        specs = [self._spec(name, tensor) for name, tensor in named.items()]
        return self._write(path, specs, self._wholes(named))

    def _write(self, path: Path, specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
        """The first rank writes the tensors, one at a time, and returns the file's hash; the others help to make them
        whole."""
        written = self._on_first(lambda: write_tensors(path, specs, tensors), finish=lambda: deque(tensors, maxlen=0))
        return {} if written is None else {path.name: written}

    def _on_first(self, write: Callable[[], T], finish: Callable[[], Any] = lambda: None) -> T | None:
        """What `write` returns, on the first rank, then `finish` on all; what fails there fails on all."""
        found = problem = None
        try:
            if self._ranks.is_first:
                found = write()
        except (OSError, SafetensorError, WeightsError) as error:
            problem = error
        finish()  # ranks that wait for each other are not left waiting
        told: str | None = self._ranks.share(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        if told is not None:
            raise CheckpointError(f"The first rank could not write: {told}")
        return found

    def _agreed(self, read: Callable[[], T]) -> T:
        """What `read` returns, or CheckpointError on every rank when it raises that on any."""
        problem: CheckpointError | None = None
        try:
            found = read()
        except CheckpointError as error:
            problem = error
        failed = self._ranks.largest(int(problem is not None))
        if problem is not None:
            raise problem
        if failed:
            raise CheckpointError("Another rank could not read the checkpoint; its own message says why.")
        return found

    def _checked(self, directory: Path) -> tuple[TensorFile, TensorFile, dict[str, Any]]:
        """The files of a checkpoint of this model, of which no tensor is read yet."""
        weights, moments, state = _opened(directory)
        _check_names(directory, [self._spec(name, tensor) for name, tensor in self._tensors().items()], weights)
        if self.adapter is not None and state.get("base") != self.adapter.base_digest():
            raise CheckpointError(
                f"{directory} holds an adapter that was trained beside another base model than the one in model.path. "
                "Resume with that model, unchanged."
            )
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

    def _tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, as it is here, perhaps sharded: of an adapter's model only what trains, else all, even
        what a user froze."""
        named = self._named_parameters()
        if self.adapter is not None:
            return {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        return named | dict(self._buffers())


def reduced(loss: Tensor, metrics: TokenMetrics, batch: TrainBatch) -> dict[str, float]:
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


def _check_names(directory: Path, specs: Sequence[TensorSpec], weights: TensorFile) -> None:
    names = {spec.name for spec in specs}
    missing, extra = sorted(names - weights.keys()), sorted(weights.keys() - names)
    if missing or extra:
        what = f"lacks {', '.join(missing[:3])}" if missing else f"has unknown {', '.join(extra[:3])}"
        raise CheckpointError(f"{directory / WEIGHTS} {what}. It belongs to another model.")
    for spec in specs:
        shape = tuple(weights.shape(spec.name))
        if shape != spec.shape:
            raise CheckpointError(
                f"{directory / WEIGHTS}: {spec.name} has shape {shape}, the model's has {spec.shape}. It belongs to another "
                "model."
            )
