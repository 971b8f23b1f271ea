"""One process, one model: the policy or the critic, its optimizer, and one number per token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rl4llm.backends.heads import ValueHead, asked_tokens, token_logprobs, token_values
from rl4llm.backends.lora import LoraAdapter
from rl4llm.backends.models import without_progress_bars
from rl4llm.backends.optimizer import Optimizer, OptimizerOptions
from rl4llm.backends.runner import Runner
from rl4llm.core.base_backend import BaseBackend, TokenLosses, TokenMetrics
from rl4llm.core.errors import CheckpointError, ConfigError, unknown
from rl4llm.core.types import TensorSpec, TrainBatch

WEIGHTS, MOMENTS, STATE = "weights.safetensors", "optimizer.safetensors", "backend.json"
FORMAT = 1
VALUE_HEAD = "value_head."
AUTOCAST = {"none": None, "bfloat16": torch.bfloat16}


class TorchBackend(BaseBackend):
    """A causal language model on one device.

    >>> backend = TorchBackend(load_model("models/tiny"), lr=1e-5, schedule="cosine", total_steps=100)
    >>> for batch in batches:
    ...     backend.forward_backward(batch, algorithm.token_losses)
    >>> backend.optim_step()["grad_norm"]

    `autocast` "bfloat16" runs matrix products in bf16 while weights, gradients and moments keep their own dtype. With a
    `value_head` it is a critic, and what `forward` and the losses see are values instead of log-probs. With an `adapter`
    only that trains and is saved; `weights` and `export` give the merged model. Further options are those of
    `OptimizerOptions`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        autocast: str = "none",
        value_head: ValueHead | None = None,
        adapter: LoraAdapter | None = None,
        **optimizer: Any,
    ):
        if autocast not in AUTOCAST:
            raise ConfigError(unknown("model.autocast", autocast, AUTOCAST))
        self.model = model
        self.adapter = adapter
        self.device = next(model.parameters()).device
        self.value_head = None if value_head is None else value_head.to(self.device)
        self._autocast = AUTOCAST[autocast]
        self._runner = Runner(model)
        self._optimizer = Optimizer(self._named_parameters(), OptimizerOptions(**optimizer))

    @torch.no_grad()
    def forward(self, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
        return self._numbers(batch.to(self.device), temperature, entropy=False)[0]

    def forward_backward(
        self, batch: TrainBatch, token_losses: TokenLosses, *, temperature: float = 1.0, entropy: bool = False
    ) -> dict[str, float]:
        batch = batch.to(self.device)
        numbers_BT, entropy_BT = self._numbers(batch, temperature, entropy)
        losses_BT, metrics = token_losses(batch, numbers_BT, entropy_BT)
        loss = (losses_BT * batch.weights_BT).sum()
        if loss.requires_grad:
            loss.backward()
        return _reduced(loss.detach(), metrics, batch)

    def optim_step(self) -> dict[str, float]:
        return self._optimizer.step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.adapter is None:
            yield from ((name, parameter.detach()) for name, parameter in self.model.named_parameters())
        else:
            yield from self.adapter.merged_parameters()
        yield from self._buffers()

    @torch.no_grad()
    def take_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        own = dict(self.weights())
        for name, tensor in weights:
            own[name].copy_(tensor)

    def weight_specs(self) -> list[TensorSpec]:
        parameters = self.model.named_parameters() if self.adapter is None else self.adapter.base_parameters()
        return [TensorSpec.of(name, tensor) for name, tensor in (*parameters, *self._buffers())]

    def write_config(self, directory: Path) -> None:
        self.model.config.save_pretrained(directory)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(directory)

    def save(self, directory: Path) -> None:
        moments, steps = self._optimizer.state()
        state = {"format": FORMAT, "step": self._optimizer.step_number, "parameter_steps": steps}
        if self.adapter is not None:
            state["base"] = self.adapter.base_digest()
        save_file(_packed(self._tensors()), directory / WEIGHTS)
        save_file(_packed(moments), directory / MOMENTS)
        (directory / STATE).write_text(json.dumps(state, indent=1))

    def load(self, directory: Path) -> None:
        """Read back what `save` wrote, into the tensors that are there, so that whoever shares them sees it too."""
        weights, moments, state = _read(directory)
        tensors = self._tensors()
        _check_names(directory, tensors, weights)
        if self.adapter is not None and state.get("base") != self.adapter.base_digest():
            raise CheckpointError(
                f"{directory} holds an adapter that was trained beside another base model than the one in model.path. "
                "Resume with that model, unchanged."
            )
        self._optimizer.restore(moments, state["parameter_steps"], state["step"])
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(weights[name])

    def write_adapter(self, directory: Path) -> None:
        """Write the adapter alone as an ordinary PEFT directory; raises ConfigError where the whole model trains."""
        if self.adapter is None:
            raise ConfigError("There is no adapter to write, since the whole model trains. Set model.lora.rank, e.g. to 16.")
        self.adapter.write(directory)

    def export(self, directory: Path) -> None:
        with without_progress_bars():
            self.model.save_pretrained(directory, state_dict=_packed(dict(self.weights())))
        if self.value_head is not None:
            self.value_head.save(directory)

    def info(self) -> dict[str, Any]:
        parameters = list(self._named_parameters().values())
        return {
            "architecture": type(self.model).__name__,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "autocast": next(name for name, dtype in AUTOCAST.items() if dtype is self._autocast),
            "device": str(self.device),
            "batches as": "one row without padding" if self._runner.streams else "padded rows",
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

    def _numbers(self, batch: TrainBatch, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        if not _has_work(batch):
            zeros_BT = torch.zeros(batch.mask_BT.shape, device=self.device)
            return zeros_BT, zeros_BT if entropy else None
        with self._precision():
            run = self._runner.hidden if self._runner.splits or self.value_head is not None else self._runner.logits
            states_SD, place_BT = run(batch)
        if self.value_head is not None:
            return token_values(states_SD, place_BT, batch, self.value_head), None
        output = self._runner.output_layer() if self._runner.splits else None
        return token_logprobs(
            states_SD, place_BT, batch, output, temperature=temperature, entropy=entropy, dtype=self._autocast
        )

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self._autocast or torch.bfloat16, enabled=self._autocast is not None)

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
        whole = dict(self.weights()) if self.adapter is None else {}
        return whole | {name: parameter.detach() for name, parameter in self._trained().items()}

    def _move(self, device: torch.device | str) -> None:
        if self.device.type == "cpu":
            return
        self.model.to(device)
        if self.value_head is not None:
            self.value_head.to(device)
        self._optimizer.to(device)
        torch.cuda.empty_cache()


def _has_work(batch: TrainBatch) -> bool:
    """Whether any token's number depends on the model."""
    return len(asked_tokens(batch)[0]) > 0


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


def _packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of their own, since safetensors refuses tensors that share storage, and engines fuse weights in place."""
    return {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def _read(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    try:
        state = json.loads((directory / STATE).read_text())
        weights, moments = load_file(directory / WEIGHTS), load_file(directory / MOMENTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"The model state in {directory} cannot be read: {error}. Use an older one.") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{directory / STATE} is not of format {FORMAT}. Resume with the version that wrote it.")
    return weights, moments, state


def _check_names(directory: Path, tensors: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    missing, extra = sorted(tensors.keys() - weights.keys()), sorted(weights.keys() - tensors.keys())
    if missing or extra:
        what = f"lacks {', '.join(missing[:3])}" if missing else f"has unknown {', '.join(extra[:3])}"
        raise CheckpointError(f"{directory / WEIGHTS} {what}. It belongs to another model.")
    for name, tensor in tensors.items():
        if weights[name].shape != tensor.shape:
            raise CheckpointError(
                f"{directory / WEIGHTS}: {name} has shape {tuple(weights[name].shape)}, the model's has "
                f"{tuple(tensor.shape)}. It belongs to another model."
            )
