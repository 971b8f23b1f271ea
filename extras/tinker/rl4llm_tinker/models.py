"""Base models, what trains on them, and what samples from them.

Adapters share the tensors of their base model: each has its own modules around the same parameters.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl4llm.backends.heads import logprobs_of_logits, selected_logprobs
from rl4llm.backends.lora import LoraAdapter, add_adapter
from rl4llm.backends.models import load_model, stored_tokenizer
from rl4llm.backends.optimizer import Optimizer, OptimizerOptions
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.base_backend import ADAPTER_WEIGHTS
from rl4llm.core.errors import CheckpointError, ConfigError, EngineError, unknown
from rl4llm.core.schema import Beta, Natural, NonNegative
from rl4llm.core.types import TrainBatch
from rl4llm.inference.local import LocalClient
from rl4llm.inference.paths import context_limit
from rl4llm_tinker.losses import TARGETS, batch_of, check_data, loss_of, total
from rl4llm_tinker.messages import Datum, ForwardBackward
from rl4llm_tinker.requests import call

ALPHA = 32  # of every adapter, whatever its rank, so that a learning rate suits all ranks
TOKENS_AT_ONCE = 512  # of a forward and backward pass: more is no faster on a CPU and needs more memory
SAMPLERS = 4  # loaded at once, beside the base models


@dataclass(frozen=True, slots=True)
class AdamParams:
    """The parameters of a step, with the SDK's names and defaults; `grad_clip_norm` 0 never clips."""

    learning_rate: NonNegative = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: NonNegative = 1e-12
    weight_decay: NonNegative = 0.0
    grad_clip_norm: NonNegative = 0.0

    def options(self) -> OptimizerOptions:
        """Return them as the optimizer takes them."""
        return OptimizerOptions(
            self.learning_rate, self.weight_decay, (self.beta1, self.beta2), self.eps, self.grad_clip_norm
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a base model trains: an adapter of this `rank`, or with rank 0 all of its weights."""

    base_model: str
    rank: Natural = 32
    seed: int = 0
    train_mlp: bool = True
    train_attn: bool = True


class Base:
    """A model of a directory or the hub under the name that clients know, whose tensors adapters share."""

    def __init__(self, name: str, source: str, dtype: str):
        self.name, self.source = name, str(Path(source).resolve()) if Path(source).is_dir() else source
        self.model = load_model(source, dtype).requires_grad_(False)
        self.tokenizer = stored_tokenizer(source)
        self.context_length = context_limit(self.model, None)[0]

    def adapted(self, shape: Shape) -> LoraAdapter:
        """Return a new adapter on new modules around the tensors of this model."""
        if shape.rank > (
            width := self.model.config.get_text_config().hidden_size
        ):  # memory that a client asks for
            raise ConfigError(f"lora_config.rank={shape.rank} is not accepted. Accepted: at most {width}.")
        shared = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        model = copy.deepcopy(self.model, shared)
        return add_adapter(
            model, rank=shape.rank, alpha=ALPHA, targets=_targets(model, shape), seed=shape.seed
        )


def _targets(model: PreTrainedModel, shape: Shape) -> Sequence[str]:
    """Return the names of layers to adapt; none for all of them."""
    if shape.train_mlp and shape.train_attn:
        return ()
    if not (shape.train_mlp or shape.train_attn):
        raise ConfigError(
            "lora_config has train_mlp=false and train_attn=false: nothing would train. Set one to true."
        )
    part = "attn" if shape.train_attn else "mlp"
    linear = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and part in name
    ]
    return sorted({name.rpartition(".")[2] for name in linear})


class Trained:
    """A client's model: it trains, and is saved and loaded."""

    def __init__(self, base: Base, shape: Shape):
        self.base, self.shape = base, shape
        adapter = base.adapted(shape) if shape.rank else None
        model = adapter.model if adapter else copy.deepcopy(base.model).requires_grad_(True)
        self.backend = TorchBackend(model, adapter=adapter)

    def forward_backward(self, request: ForwardBackward) -> tuple[list[Tensor], dict[str, float]]:
        """Return the log-probs of each datum's targets, in their shape, and the metrics; add the gradient if asked to."""
        loss, options = loss_of(request.loss_fn, request.options)
        vocabulary = self.backend.model.get_input_embeddings().num_embeddings
        check_data(request.loss_fn, loss, request.data, vocabulary, self.base.context_length)
        logprobs: list[Tensor] = []
        summed = 0.0
        for data in _parts(request.data):
            with torch.set_grad_enabled(not request.forward_only):
                batch = batch_of(data).to(self.backend.device)
                logprobs_M = self._logprobs(batch, data)
                part = total(loss, options, data, batch, logprobs_M)
            if part.requires_grad:
                part.backward()
            summed += part.item()
            sizes = [datum.inputs[TARGETS].numel() for datum in data]
            rows = logprobs_M.detach().cpu().split(sizes)
            logprobs += [row.view(datum.inputs[TARGETS].shape) for row, datum in zip(rows, data, strict=True)]
        return logprobs, {"loss:sum": summed}

    def _logprobs(self, batch: TrainBatch, data: Sequence[Datum]) -> Tensor:
        """Return the log-probs (M) of all targets, one datum after the other, with all targets of a position together."""
        runner = self.backend.runner
        targets = [datum.inputs[TARGETS].long().view(len(datum.tokens), -1) for datum in data]
        device = batch.mask_BT.device
        counts_P = torch.cat([torch.full((len(rows),), rows.shape[1]) for rows in targets]).to(device)
        targets_M = torch.cat([rows.flatten() for rows in targets]).to(device)
        whole = replace(batch, mask_BT=batch.segment_ids_BT > 0)  # so that all of it is computed
        states_SD, place_BT = (runner.hidden if runner.splits else runner.logits)(whole)
        states_MD = states_SD.index_select(0, place_BT[batch.mask_BT].repeat_interleave(counts_P))
        if runner.splits:
            return selected_logprobs(states_MD, runner.output_layer(), targets_M)[0]
        return logprobs_of_logits(states_MD, targets_M)[0]

    def optim_step(self, given: dict[str, Any]) -> dict[str, float]:
        """Take a step of AdamW with the parameters of a request; return the metrics.

        Raises ConfigError for other parameters, and EngineError if the gradient is not finite or the weights would not be:
        then the weights stay.
        """
        if (kind := given.get("type", "adamw")) not in ("adamw", "adam"):
            raise ConfigError(f"The optimizer {kind!r:.80} is not available. Accepted: adamw.")
        accepted = [field.name for field in fields(AdamParams)]
        if other := sorted(given.keys() - {*accepted, "type"}):
            raise ConfigError(unknown("adam_params", other[0], accepted))
        params, optimizer = call(AdamParams, given, "adam_params"), self.backend.optimizer
        _use(optimizer, params.options())
        large = max(params.learning_rate, params.weight_decay) > 1 or max(params.beta1, params.beta2) > 0.9999
        undo = _undo(optimizer) if large or params.eps < 1e-16 else None  # else float32 does not overflow
        metrics = self.backend.optim_step()
        if "skipped" in metrics:
            raise EngineError(
                "The gradient is NaN or infinite, so optim_step discarded it and changed no weights. Next: compare the "
                "log-probs of forward_backward with those that the data brings."
            )
        if undo and not all(one.square().sum().isfinite() for one in optimizer.stepped.values()):
            undo()
            raise EngineError(
                "The weights became NaN, infinite or too large, so optim_step discarded the step and changed no weights. "
                "Next: lower learning_rate or weight_decay, or raise eps."
            )
        return {f"{name}:mean": value for name, value in metrics.items()}

    def load(self, directory: Path, *, optimizer: bool) -> None:
        """Load what `backend.save` wrote, the optimizer too or as a new one."""
        self.backend.load(directory)
        if not optimizer:
            fresh = self.backend.optimizer
            fresh.adam.state.clear()
            fresh.adam.zero_grad(set_to_none=True)
            fresh.step_number = 0

    def publish(self, directory: Path) -> None:
        """Write what a sampler loads: the adapter as a PEFT directory, or the whole model."""
        if self.shape.rank:
            self.backend.write_adapter(directory)
        else:
            self.backend.export(directory)


def _use(optimizer: Optimizer, options: OptimizerOptions) -> None:
    """Take other options from the next step on; the moments stay."""
    optimizer.options = options
    for group in optimizer.adam.param_groups:
        decays = any(parameter.ndim > 1 for parameter in group["params"])
        group.update(
            betas=options.betas, eps=options.eps, weight_decay=options.weight_decay if decays else 0.0
        )


def _undo(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that takes the optimizer back to its present weights and moments."""
    weights = [*optimizer.parameters.values(), *optimizer.masters.values()]
    copies, (moments, steps) = [one.detach().clone() for one in weights], optimizer.state()
    moments, number = {name: moment.clone() for name, moment in moments.items()}, optimizer.step_number

    def undo() -> None:
        with torch.no_grad():
            for weight, kept in zip(weights, copies, strict=True):
                weight.copy_(kept)
        optimizer.restore(moments, steps, number)

    return undo


def _parts(data: Sequence[Datum]) -> Iterator[list[Datum]]:
    """Yield runs of data that fit into one pass when padded to their longest."""
    part: list[Datum] = []
    for datum in data:
        longest = max(len(item.tokens) for item in (*part, datum))
        if part and longest * (len(part) + 1) > TOKENS_AT_ONCE:
            yield part
            part = []
        part.append(datum)
    if part:
        yield part


class ModelSampler:
    """The embedded engine on a base model, or on weights that a client saved."""

    def __init__(self, base: Base, weights: Path | None, shape: Shape | None, dtype: str):
        self.tokenizer = base.tokenizer
        if weights is None or shape is None:
            self.model = base.model
        elif shape.rank:
            self.model = self._with_adapter(base.adapted(shape), weights)
        else:
            self.model = load_model(weights, dtype).requires_grad_(False)
        self.client = LocalClient(self.model, base.tokenizer)
        self.running = 0

    def _with_adapter(self, adapter: LoraAdapter, weights: Path) -> PreTrainedModel:
        tensors = load_file(weights / ADAPTER_WEIGHTS)
        with torch.no_grad():
            for name, parameter in adapter.parameters():
                if name not in tensors:
                    raise CheckpointError(f"{weights} has no {name}. It belongs to another model.")
                parameter.copy_(tensors[name])
        return adapter.model

    @torch.inference_mode()
    def distributions(self, token_ids: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Return the log-probs (N - 1, V) of what follows each token but the last."""
        logits = self.model(input_ids=torch.tensor([token_ids], device=self.model.device)).logits[0, :-1]
        return logits.float().div_(temperature or 1.0).log_softmax(-1)  # in place, as logits are large


class Samplers:
    """The samplers that are loaded; of those on saved weights, the ones that were not used for longest make room."""

    def __init__(self, bases: Mapping[str, Base], dtype: str):
        self._bases, self._dtype = bases, dtype
        self._of_base: dict[str, ModelSampler] = {}
        self._saved: OrderedDict[Path, ModelSampler] = OrderedDict()

    def of(self, name: str, weights: Path | None, shape: Shape | None) -> ModelSampler:
        """Return the sampler of these weights, or of the base model itself."""
        if weights is None:
            if name not in self._of_base:
                self._of_base[name] = ModelSampler(self._bases[name], None, None, self._dtype)
            return self._of_base[name]
        if weights not in self._saved:
            if not weights.is_dir():
                raise CheckpointError(
                    "These weights were deleted, or had no name and were replaced by newer ones. Make a new sampling client."
                )
            self._saved[weights] = ModelSampler(self._bases[name], weights, shape, self._dtype)
        self._saved.move_to_end(weights)
        idle = [path for path, sampler in self._saved.items() if not sampler.running and path != weights]
        for path in idle[: max(0, len(self._saved) - SAMPLERS)]:
            del self._saved[path]
        return self._saved[weights]

    def keep(self, used: set[Path | None]) -> None:
        """Forget the samplers of all other weights."""
        for path in self._saved.keys() - used:
            del self._saved[path]


def likeliest(logprobs_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` likeliest tokens (N, K) of each row, and their log-probs."""
    found = logprobs_NV.topk(min(count, logprobs_NV.shape[1]), dim=-1)
    return found.indices, found.values


def after_first(tensor_N: Tensor, value: float = math.nan) -> Tensor:
    """Return the rows behind one of this value, which stands for the first token: nothing came before it."""
    return torch.cat([tensor_N.new_full((1, *tensor_N.shape[1:]), value), tensor_N])
