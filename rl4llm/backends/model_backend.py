"""What all backends with a Hugging Face model share: names, files, and ranks that agree on both."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rl4llm.backends.checkpoint_names import CheckpointNames
from rl4llm.backends.heads import OutputLayer, ValueHead
from rl4llm.backends.model_files import WEIGHTS as MODEL
from rl4llm.backends.model_files import whole_checkpoint
from rl4llm.backends.runner import ModelRunner, TokenNumbers
from rl4llm.backends.source_form import SourceForm, save_pretrained
from rl4llm.core.base_backend import ADAPTER_WEIGHTS, AUTOCAST, BaseBackend
from rl4llm.core.errors import CheckpointError, WeightsError
from rl4llm.core.model_memory import FP32, ModelShape, Precision
from rl4llm.core.registry import load
from rl4llm.core.types import TrainBatch
from rl4llm.core.weights import TensorSpec
from rl4llm.runs.tensor_file import TensorFile, write_tensors
from rl4llm.runtime import devices
from rl4llm.runtime.quantized import quantized_layers
from rl4llm.runtime.ranks import Ranks

WEIGHTS, MOMENTS, STATE = "weights.safetensors", "optimizer.safetensors", "backend.json"
FORMAT = 1
VALUE_HEAD = "value_head."
REFERRED = (
    ("ref_logprobs_BT", "ref_states_BTD"),
    ("ref_logprobs_BT", "ref_top_ids_BTK", "ref_top_logprobs_BTK"),
)
"""What a reference's pass fills, for the whole vocabulary and for its most probable tokens."""
T = TypeVar("T")


class ModelBackend(BaseBackend):
    """A backend of one model; subclasses implement how a sharded tensor becomes whole.

    `save` writes the same files for any number of ranks and any sharding: `weights.safetensors`,
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
        self.model = model
        self._form = SourceForm(model)
        place = next(model.parameters()).device if device is None else device
        self.device = torch.empty(0, device=place).device  # with its index
        if self.device.type != "cpu":
            devices.use_exact_kernels()
        self.value_head = None if value_head is None else value_head.to(self.device)
        self._ranks = ranks
        self._autocast = autocast
        self._module = TokenNumbers(model, self.value_head, AUTOCAST[autocast], ranks)

    @torch.no_grad()
    def forward(self, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
        numbers_BT: Tensor = self._pass(batch, temperature, False)[0]
        return numbers_BT

    @torch.no_grad()
    def refer(self, batch: TrainBatch, top: int, *, temperature: float = 1.0) -> dict[str, Tensor]:
        head = load("rl4llm.backends.distributions:ReferenceHead")(top)
        numbers = self._pass(batch, temperature, False, head)
        return dict(zip(REFERRED[top > 0], numbers, strict=True))

    def output(self) -> OutputLayer | None:
        if not self.runner.splits:
            return None
        layer = self.runner.output_layer()
        named = {"weight": layer.weight_VD} | ({} if layer.bias_V is None else {"bias": layer.bias_V})
        # what ranks put together is theirs to take apart again
        wholes, copies = self._wholes(named), self._ranks.size > 1
        tensors = {name: tensor.detach().to(self.device, copy=copies) for name, tensor in wholes}
        return OutputLayer(tensors["weight"], tensors.get("bias"), layer.softcap)

    @abstractmethod
    def _pass(self, batch: TrainBatch, *how: Any) -> tuple[Any, ...]:
        """Run one pass of the module; `how` are the arguments of `TokenNumbers.forward` after the batch."""

    @property
    def runner(self) -> ModelRunner:
        """Return what computes hidden states, for numbers of other tokens than a batch's own."""
        return self._module.runner

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._names.converted(self.own_weights())

    def weight_specs(self) -> list[TensorSpec]:
        return list(self._names.specs)

    @abstractmethod
    def own_weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def write_config(self, directory: Path) -> None:
        if not self._ranks.is_first:
            return
        whole = whole_checkpoint(self.model)
        if whole is None:
            config = self.model.config
            # which servers start by
            config.architectures = config.architectures or [type(self.model).__name__]
            config.save_pretrained(directory)
        else:
            whole.write_config(directory, self.model)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(directory)
        self._form.keep(directory)

    def saved_bytes(self) -> int:
        tensors = self._tensors().values()  # of what trains, a float32 weight and its two moments
        return sum(
            self._size(parameter) * (3 * FP32 if parameter.requires_grad else parameter.itemsize)
            for parameter in tensors
        )

    def write_adapter(self, directory: Path) -> None:
        """Write the adapter alone as an ordinary PEFT directory."""
        adapter = self.adapter
        assert adapter is not None  # set model.lora.rank
        self._write(directory / ADAPTER_WEIGHTS, adapter.specs(), adapter.weights())
        self._on_first(lambda: adapter.write_config(directory))

    def export(self, directory: Path) -> None:
        if whole_checkpoint(self.model) is None or self.value_head is not None:
            self._save_pretrained(directory)
        else:
            directory.mkdir(parents=True, exist_ok=True)
            # the other ranks have no names of files, and help to make tensors whole
            is_first = self._ranks.is_first
            specs = self.weight_specs() if is_first else []
            self._write(directory / MODEL, specs, self.weights() if is_first else self.own_weights())
            self._on_first(lambda: self.write_config(directory))

    def _save_pretrained(self, directory: Path) -> None:
        tensors = {}  # transformers wants all at once, in the memory of the CPU; other ranks keep none
        for name, tensor in self._exported():
            if self._ranks.is_first:
                # A copy, since safetensors refuses tensors that share storage, and engines fuse weights in place.
                tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)

        def write() -> None:
            save_pretrained(self.model, directory, state_dict=tensors)
            if self.value_head is not None:
                self._write_as_classifier(directory / "config.json")
            self._form.keep(directory)

        self._on_first(write)

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights; where there is a value head, it is the score, and there is no output layer."""
        if self.value_head is None:
            yield from self.own_weights()
            return
        output = self.model.get_output_embeddings()
        left_out = next(f"{name}." for name, module in self.model.named_modules() if module is output)
        yield from (item for item in self.own_weights() if not item[0].startswith(left_out))
        yield from self._wholes({"score.weight": self.value_head.linear.weight})

    def _write_as_classifier(self, config: Path) -> None:
        from rl4llm.backends.classifier import name_of_classifier  # noqa: PLC0415 - most models are policies

        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        written = json.loads(config.read_text(encoding="utf-8"))
        written |= {"architectures": [name_of_classifier(self.model)], **labels}
        config.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")

    def info(self) -> dict[str, Any]:
        parameters = list(self._named_parameters().values())
        layers = quantized_layers(self.model).values()
        packed = sum(layer.in_features * layer.out_features for layer in layers)
        return {
            "architecture": type(self.model).__name__,
            "parameters": packed + sum(self._size(parameter) for parameter in parameters),
            "trainable": sum(self._size(parameter) for parameter in parameters if parameter.requires_grad),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            **({"in 4 bits": packed} if packed else {}),
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

    def layout(self, layout: str) -> str:
        # The rows of a packed batch would be as long as its longest trajectory, and need more memory than its tokens.
        return layout if self._module.runner.streams else "sorted"

    def path(self) -> str:
        module, runner = self._module, self._module.runner
        if not runner.streams:
            return "updates compute padded rows"
        one_call = runner.kernel(self.device, module.autocast or self.model.dtype) is not None
        attention = "in one call a layer" if one_call else "block by block"
        return f"updates compute one row without padding, attention {attention}"

    def warnings(self) -> list[str]:
        warnings = []
        if reason := self._module.runner.padded_since:
            warnings.append(
                f"{type(self.model).__name__} trains on padded rows, since {reason}. What several samples share is "
                "computed for each of them, and so is padding."
            )
        if self.adapter is not None and (names := self.adapter.excluded):
            warnings.append(f"The adapter leaves out {', '.join(sorted(names))}, which PEFT cannot adapt.")
        experts = [
            name for name, item in self._named_parameters().items() if item.dim() == 3 and 1 not in item.shape
        ]
        if experts and quantized_layers(self.model):
            others = len(experts) - 1
            warnings.append(f"{experts[0]} and {others} others are experts, which stay in model.dtype.")
        return warnings

    @cached_property
    def _names(self) -> CheckpointNames:
        return CheckpointNames(self.model, self._own_specs())

    @abstractmethod
    def _own_specs(self) -> list[TensorSpec]:
        """Return names, shapes and dtypes of `own_weights`, without gathering any."""

    @abstractmethod
    def _sharing(self) -> str:
        """Return how many ranks there are, and how they share the model."""

    @abstractmethod
    def _wholes(self, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same tensors, each whole."""

    def _spec(self, name: str, tensor: Tensor) -> TensorSpec:
        """Return name, shape and dtype of the whole tensor."""
        return TensorSpec.of(name, tensor)

    def _size(self, tensor: Tensor) -> int:
        return math.prod(self._spec("", tensor).shape)

    def _write_own(self, path: Path, named: Mapping[str, Tensor]) -> dict[str, str]:
        specs = [self._spec(name, tensor) for name, tensor in named.items()]
        return self._write(path, specs, self._wholes(named))

    def _write(
        self, path: Path, specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, Tensor]]
    ) -> dict[str, str]:
        """Write the tensors, one at a time, on the first rank, and return the file's hash there; the others help to make
        them whole."""
        written = self._on_first(
            lambda: write_tensors(path, specs, tensors), finish=lambda: deque(tensors, maxlen=0)
        )
        return {} if written is None else {path.name: written}

    def _on_first(self, write: Callable[[], T], finish: Callable[[], Any] = lambda: None) -> T | None:
        """Run `write` on the first rank, then `finish` on all. Return what `write` returns; one rank's failure fails all."""
        failures = OSError, SafetensorError, WeightsError

        def work() -> T | None:
            try:
                written = write() if self._ranks.is_first else None
            except failures:
                finish()  # ranks that wait for each other are not left waiting
                raise
            finish()
            return written

        otherwise = CheckpointError("Rank 0 could not write the files; its own message says why.")
        return self._ranks.agree(work, failures, otherwise)

    def _agreed(self, read: Callable[[], T]) -> T:
        """Return what `read` returns. Raise CheckpointError on every rank when it raises that on any."""
        otherwise = CheckpointError("Another rank could not read the checkpoint; its own message says why.")
        return self._ranks.agree(read, (CheckpointError,), otherwise)

    def _checked(self, directory: Path) -> tuple[TensorFile, TensorFile, dict[str, Any]]:
        """Open the files of a checkpoint of this model; no tensor is read yet."""
        weights, moments, state = _opened(directory)
        _check_names(
            directory, [self._spec(name, tensor) for name, tensor in self._tensors().items()], weights
        )
        if self.adapter is not None and state.get("base") != self.adapter.base_digest():
            raise CheckpointError(
                f"{directory} holds an adapter that was trained on another base model than the one in model.path. "
                "Set model.path to that base model, unchanged."
            )
        return weights, moments, state

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        state = self.model.state_dict(keep_vars=True)
        for name, buffer in self.model.named_buffers():
            if name in state:
                yield name.replace(".base_layer", ""), buffer.detach()  # as before PEFT wrapped its layer

    def _named_parameters(self) -> dict[str, torch.nn.Parameter]:
        named = dict(self.model.named_parameters())
        if self.value_head is not None:
            named |= {VALUE_HEAD + name: parameter for name, parameter in self.value_head.named_parameters()}
        return named

    def _tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds, as it is here, perhaps sharded: of an adapter's model only what trains, else all,
        even what a user froze."""
        named = self._named_parameters()
        if self.adapter is not None:
            return {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        return named | dict(self._buffers())


def gathered(shape: ModelShape, precision: Precision, *, trains: bool) -> int:
    """Return the bytes that a sharded model gathers while it runs: the root from forward to backward, two layers at a time
    and, where the whole model trains, their gradients."""
    root = shape.root * precision.weights
    gradients = root + shape.layer * FP32 if trains and not shape.adapter else 0
    return root + 2 * shape.layer * precision.computed + gradients


def part_of(size: int, ranks: int) -> int:
    """Return the bytes of the largest part when `ranks` share `size` bytes."""
    return -(-size // ranks)


def _opened(directory: Path) -> tuple[TensorFile, TensorFile, dict[str, Any]]:
    try:
        state = json.loads((directory / STATE).read_text())
        if state["format"] != FORMAT:
            raise ValueError(f"it has the format {state['format']} of another version of rl4llm")
        return TensorFile(directory / WEIGHTS), TensorFile(directory / MOMENTS), state
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"The model state in {directory} cannot be read: {error}. Use an older checkpoint."
        ) from error


def _check_names(directory: Path, specs: Sequence[TensorSpec], weights: TensorFile) -> None:
    shapes = {spec.name: spec.shape for spec in specs}
    differing = dict(shapes.items() ^ {(name, tuple(weights.shape(name))) for name in weights})
    if differing:
        raise CheckpointError(
            f"{directory / WEIGHTS} belongs to another model: {len(differing)} tensors differ, such as {min(differing)}."
        )
