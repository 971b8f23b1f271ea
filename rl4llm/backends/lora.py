"""LoRA (Hu et al. 2021): small matrices trained beside a frozen model, through PEFT, whose imports live here."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl4llm.backends.model_files import refuse_adapted, whole_checkpoint
from rl4llm.core.base_backend import BaseAdapter, BaseBackend
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import needed
from rl4llm.core.types import TrainBatch
from rl4llm.core.weights import TensorSpec
from rl4llm.runs.tensor_file import tensors_digest
from rl4llm.runtime.quantized import QuantizedLinear, quantized_weights
from rl4llm.runtime.ranks import whole
from rl4llm.runtime.seeds import derive_seed

_peft = partial(needed, "peft", "model.lora.rank above 0", "lora")
NAME = "default"  # PEFT's for the only adapter of a model
MATRICES = ("lora_A", "lora_B")
CONFIG = "adapter_config.json"


class LoraAdapter(BaseAdapter):
    """The adapter of a model: W x becomes W x + alpha / rank * B A x in each of the chosen linear layers.

    >>> adapter = add_adapter(load_model("models/tiny"), rank=16, seed=42)
    >>> backend = TorchBackend(adapter.model, adapter=adapter, lr=1e-4)
    """

    def __init__(self, model: PreTrainedModel, options: Any):
        self.model = model
        self._options, self.excluded = options, frozenset(options.exclude_modules or ())
        layer_type = _peft().tuners.lora.LoraLayer
        self._layers = {
            name: module for name, module in model.named_modules() if isinstance(module, layer_type)
        }
        # By the plain name of the parameter that each adapts: a layer's weight, or a tensor of fused experts.
        self._adapted = {
            f"{name}.{getattr(layer, 'parameter_name', 'weight')}".replace(".base_layer", ""): layer
            for name, layer in self._layers.items()
        }
        self._digest: str | None = None

    @property
    def rank(self) -> int:
        return self._options.r

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield A and B of each layer under the names of a PEFT file, perhaps sharded."""
        # In a vision-language model, which a server runs, the text model's layers have this place.
        inner = "model." if whole_checkpoint(self.model) is None else "model.language_model."
        for name, parameter in self.model.named_parameters():
            if self._is_own(name):
                placed = name.replace("model.", inner, 1).replace(f".{NAME}.", ".")
                yield f"base_model.model.{placed}", parameter.detach()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, whole(parameter)) for name, parameter in self.parameters())

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec.of(name, tensor) for name, tensor in self.parameters()]

    def write_config(self, directory: Path) -> None:
        options = self._options.to_dict() | {"inference_mode": True}
        if whole_checkpoint(self.model) is not None:
            targets = {name.rpartition(".")[2] for name in options["target_modules"]} - self.excluded
            options |= {"target_modules": targets, "exclude_modules": r"(?!.*\blanguage_model\.).*"}
        # Sets have another order in every process.
        options = {key: sorted(value) if isinstance(value, set) else value for key, value in options.items()}
        (directory / CONFIG).write_text(json.dumps(options, indent=1, sort_keys=True))

    def base_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the frozen model's parameters under their Hugging Face names."""
        for name, parameter in self.model.named_parameters():
            if not self._is_own(name):
                yield name.replace(".base_layer", ""), parameter.detach()  # as before PEFT wrapped its layer
        yield from quantized_weights(self.model)

    @torch.no_grad()
    def merged_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of the equivalent plain model, one at a time.

        In a sharded model those that the adapter leaves as they are stay sharded, and all ranks must iterate.
        """
        for name, parameter in self.base_parameters():
            layer = self._adapted.get(name)
            if layer is not None:
                matrices = {
                    f"layer.{matrix}.{NAME}.weight": whole(tensor)
                    for matrix, tensor in zip(MATRICES, self.beside(name), strict=True)
                }
                change = torch.func.functional_call(_Delta(layer), matrices, ())
                parameter = (whole(parameter) + change).to(parameter.dtype)
            yield name, parameter

    @torch.no_grad()
    def lost_by_merging(self) -> float:
        """Return the share of the adapter's change that the dtype of merged weights rounds away, by Frobenius norms."""
        lost, changed = torch.zeros(2, dtype=torch.float64)
        for name, weight in self.base_parameters():
            if (layer := self._adapted.get(name)) is not None:
                change = layer.get_delta_weight(NAME).float()
                rounded = (weight + change).to(weight.dtype).float() - weight.float()
                lost += (rounded - change).square().sum().cpu()
                changed += change.square().sum().cpu()
        return float((lost / changed.clamp(min=1e-30)).sqrt())

    def check_merges(self) -> None:
        """Raise ConfigError if a layer adapts what is not a parameter of the plain model, or two adapt the same one."""
        lost = self._adapted.keys() - {name for name, _ in self.base_parameters()}
        if lost or len(self._adapted) < len(self._layers):
            what = min(lost, default="a parameter that two layers adapt")
            raise ConfigError(
                f"model.lora cannot be merged into {type(self.model).__name__}: PEFT adapts {what}. Next: name other layers "
                "in model.lora.targets, or train the whole model (model.lora.rank=0)."
            )

    def beside(self, name: str) -> list[Tensor]:
        """Return A and B that adapt the base parameter of this name; none where it stays as it is."""
        layer = self._adapted.get(name)
        return [] if layer is None else [getattr(layer, matrix)[NAME].weight for matrix in MATRICES]

    def base_digest(self) -> str:
        """Return the xxh3 of the frozen parameters; an adapter belongs to exactly these."""
        if self._digest is None:
            self._digest = tensors_digest((name, whole(item)) for name, item in self.base_parameters())
        return self._digest

    @contextmanager
    def off(self) -> Iterator[None]:
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def _is_own(self, name: str) -> bool:
        """Whether a parameter is the adapter's: its layer's name, lora_A or lora_B, the adapter's name, weight."""
        layer, _, matrix = name.removesuffix(f".{NAME}.weight").rpartition(".")
        return matrix in MATRICES and layer in self._layers


class _Delta(nn.Module):
    """What an adapted layer adds to its parameter, computed from whatever A and B it is called with."""

    def __init__(self, layer: Any):
        super().__init__()
        self.layer = layer

    def forward(self) -> Tensor:
        change: Tensor = self.layer.get_delta_weight(NAME)
        return change


class FrozenModel:
    """The model under a backend's adapter. It is what the policy began as, so it serves as the reference without a copy."""

    problem = ""

    def __init__(self, backend: BaseBackend, adapter: BaseAdapter):
        self._backend = backend
        self._adapter = adapter

    def forward(self, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
        """Return what `BaseBackend.forward` returns without the adapter."""
        with self._adapter.off():
            return self._backend.forward(batch, temperature=temperature)

    def refer(self, batch: TrainBatch, top: int, *, temperature: float = 1.0) -> dict[str, Tensor]:
        """Return what `BaseBackend.refer` returns without the adapter."""
        with self._adapter.off():
            return self._backend.refer(batch, top, temperature=temperature)

    def output(self) -> Any:
        """Return what `BaseBackend.output` returns."""
        return self._backend.output()


def add_adapter(
    model: PreTrainedModel, *, rank: int, alpha: int | None = None, targets: Sequence[str] = (), seed: int = 0
) -> LoraAdapter:
    """Put an adapter into a model, which keeps its class; of all its parameters only the adapter's need gradients then.

    `targets` are names of linear layers; without any, all except the output layer and what PEFT cannot adapt, see
    `BaseAdapter.excluded`. `alpha` is twice the rank by default. The same seed gives the same adapter. A is random and
    B zero, so the model computes what it did before.
    """
    peft = _peft()
    refuse_adapted(model)
    options = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=list(targets) or "all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    kind = model.device.type
    generators = torch.random.fork_rng([] if kind == "cpu" else [model.device], device_type=kind)
    with generators, warnings.catch_warnings():
        # PEFT warns of settings for other architectures than it expected, and corrects them.
        warnings.simplefilter("ignore")
        if not targets:
            options.exclude_modules = _excluded(model) or None
        torch.manual_seed(derive_seed(seed, "lora"))
        peft.inject_adapter_in_model(options, model, adapter_name=NAME)
    adapter = LoraAdapter(model, options)
    _check_inner(model, targets)
    adapter.check_merges()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(adapter._is_own(name))
        if parameter.requires_grad and parameter.dtype.itemsize < 4:  # small steps vanish in 16 bits
            parameter.data = parameter.data.float()
    return adapter


def adapter_size(model: PreTrainedModel, rank: int, targets: Sequence[str] = ()) -> int:
    """Return how many numbers `add_adapter` would add: A (rank, in) and B (out, rank) beside each chosen layer or expert.

    Hu et al. 2021, section 4.1. Needs no memory, and leaves the model as it is.
    """
    with torch.device("meta"):
        adapter = add_adapter(type(model)(model.config), rank=rank, targets=targets)
    return sum(tensor.numel() for _, tensor in adapter.parameters())


def _check_inner(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Embeddings and output layer are often one tensor, which an adapter on either would make two."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(module, _peft().tuners.lora.LoraLayer):
            raise ConfigError(
                f"model.lora.targets={list(targets)}: embedding and output layer stay frozen. Leave them out."
            )


def _excluded(model: PreTrainedModel) -> set[str]:
    """Return the names of linear layers that PEFT cannot adapt, by a trial of each kind.

    Routers return more than a tensor, and fused kernels read the weights of some layers, which they never call.
    """
    kinds = {(name.rpartition(".")[2], type(layer)): layer for name, layer in _inner_layers(model).items()}
    excluded: set[str] = set()
    for (name, _), layer in kinds.items():
        layer = nn.Linear(1, 1) if isinstance(layer, QuantizedLinear) else layer  # PEFT wants a parameter
        part = nn.ModuleDict({name: layer})
        part.config = model.config
        try:
            _peft().inject_adapter_in_model(_peft().LoraConfig(r=1, target_modules=[name]), part)
            part[name](layer.weight.new_zeros(1, layer.in_features))
        except (AttributeError, ValueError):
            excluded.add(name)
    return excluded


def _inner_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers that may have an adapter: all but the output layer."""
    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module not in outer
    }
