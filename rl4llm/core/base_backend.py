"""The contract of training backends: one model, its optimizer, and one number per token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from rl4llm.core.model_memory import ModelMemory, ModelShape, Precision
from rl4llm.core.types import TrainBatch
from rl4llm.core.weights import TensorSpec
from rl4llm.runtime.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TokenMetrics = dict[str, Tensor]
TokenLosses = Callable[[TrainBatch, Tensor, Tensor | None], tuple[Tensor, TokenMetrics]]
"""(batch, logprobs_BT, entropy_BT or None) -> (losses_BT, metrics by name, each (B, T))."""
TokenMeasures = Callable[[TrainBatch, Tensor, TokenMetrics], TokenMetrics]
"""(batch, logprobs_BT, the metrics of the losses) -> further metrics, each (B, T)."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far the policy is from a reference at each token; a loss, with its gradient.

    `formula` makes a number (N,) of log-probs of the policy and of the reference, each (N, K): of the `top` tokens that are
    most probable for the reference, or of the whole vocabulary where that is 0.
    """

    formula: Callable[[Tensor, Tensor], Tensor]
    top: int = 0


class Head(Protocol):
    """Makes numbers of tokens from hidden states, in place of `rl4llm.backends.heads.token_logprobs`."""

    def __call__(
        self, hidden_SD: Tensor, place_BT: Tensor, batch: TrainBatch, output: Any, /, *,
        temperature: float, entropy: bool, dtype: torch.dtype | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return tensors that begin with (B, T)."""
        ...

    def nothing(self, zeros_BT: Tensor, entropy: bool) -> tuple[Any, ...]:
        """Return the same for a batch that asks for no token."""
        ...


class TokenScorer(Protocol):
    """A model that gives each token one number; a reference needs nothing else.

    `problem` is why the last token that got NaN, not a number, has none.
    """

    problem: str = ""

    def forward(self, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
        """Return what `BaseBackend.forward` returns."""
        ...

    def refer(self, batch: TrainBatch, top: int, *, temperature: float = 1.0) -> dict[str, Tensor]:
        """Return the tensors of a batch that a `Divergence` of this `top` from this model needs, by name."""
        ...

    def output(self) -> Any:
        """Return the whole output layer without gradient, for `ref_states_BTD`; None if these are logits.

        All ranks call it.
        """
        ...


AUTOCAST = {"none": None, "bfloat16": torch.bfloat16}
"""Dtypes of matrix products by `model.autocast`."""

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""The file of an adapter's weights in a PEFT directory."""


class BaseAdapter(ABC):
    """Trained weights beside a frozen model, in the form that engines load: an ordinary PEFT directory."""

    excluded: frozenset[str] = frozenset()  # names of linear layers that could not be adapted

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of each weight, in the order of `specs`."""

    @abstractmethod
    def specs(self) -> list[TensorSpec]:
        """Return names, shapes and dtypes of what `weights` yields."""

    @abstractmethod
    def write_config(self, directory: Path) -> None:
        """Write the files of an adapter's directory other than its weights."""

    @abstractmethod
    def base_digest(self) -> str:
        """Return a hash of the frozen parameters; an adapter belongs to exactly these."""

    @abstractmethod
    def off(self) -> AbstractContextManager[None]:
        """Switch the adapter off inside the context; nothing may train meanwhile."""


class BaseBackend(TokenScorer, ABC):
    """A model that is trained, and the head that turns its output into one number per token.

    The loss of an optimizer step is the sum of ``losses_BT * batch.weights_BT`` over the `forward_backward` calls since
    the last `optim_step`, on all ranks together; nothing else scales it. A batch whose mask is False everywhere adds exactly
    0: a rank that has fewer than the others gives such ones. Where only an `adapter` trains, `weights` are the merged ones.
    """

    model: PreTrainedModel
    adapter: BaseAdapter | None = None
    takes_low_bits: bool = False  # whether frozen weights may have 4 bits, and moments 8
    whole: bool = True  # whether this rank holds all of the weights, so that an engine in its process can read them in place

    @classmethod
    def shares_weights(cls, ranks: Ranks, options: Mapping[str, Any]) -> bool:
        """Return whether these options shard every weight over the ranks.

        Then the backend moves the model to the device, and only the first rank needs its numbers before.
        """
        return False

    @classmethod
    def check_trains(cls, options: Mapping[str, Any], dtype: str) -> None:
        """Raise ConfigError if a model of this dtype cannot train with these options."""

    @classmethod
    def check_leaves(cls, options: Mapping[str, Any], dtype: str, *, reference: bool) -> None:
        """Raise ConfigError if models with these options, or a `reference` that is one of them, cannot `offload`."""

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
        """Return the memory that a model of this shape takes on each of `ranks` with these options of a configuration; by
        default each rank has all of it."""
        return ModelMemory.of(shape, precision, trains=trains)

    def layout(self, layout: str) -> str:
        """Return the layout of batches for this model; by default the one of the configuration."""
        return layout

    @abstractmethod
    def forward(self, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
        """Return log-probs (B, T), fp32, no gradient, of each token given those before it; 0 where `mask_BT` is False."""

    @abstractmethod
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
        """Add this batch's gradient; return "loss", "tokens" (of the policy), and each token metric by its name: the mean
        over those tokens, the maximum where the name ends in "/max", and where it ends in "/weighted" the sum with the
        weights of the loss.

        `entropy` requests entropy_BT (with gradient), which costs time and is None otherwise. `measures` returns
        further metrics. The third number of a `head` is `ref_divergence_BT` of the batch for the losses. Under
        `torch.no_grad()` this only measures.

        With `last` False more batches of this optimizer step follow, so ranks need not exchange gradients yet. Always
        passing True gives the same gradients, only slower. All ranks must pass equally many batches and the same `last`.
        """

    @abstractmethod
    def optim_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, zero the gradients; return "grad_norm" and "lr".

        A non-finite gradient skips the step and adds "skipped": 1.0.
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of each weight of the Hugging Face checkpoint, one by one, as `weight_specs` has them."""

    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same weights in the form that `model` has in memory, where that is another one."""
        return self.weights()

    @abstractmethod
    def take_weights(self, weights: Iterator[tuple[str, Tensor]], rate: float = 1.0) -> None:
        """Move the weights by `rate` of the way to another model's `own_weights`, in any order; 1 copies them."""

    @abstractmethod
    def weight_specs(self) -> list[TensorSpec]:
        """Return names, shapes and dtypes of what `weights` yields, without gathering any."""

    @abstractmethod
    def write_config(self, directory: Path) -> None:
        """Write the files of a Hugging Face model directory other than its weights."""

    @abstractmethod
    def save(self, directory: Path) -> dict[str, str]:
        """Write weights, optimizer and schedule into an existing directory, as safetensors and JSON; return the
        xxh3_64 of files that were hashed while writing, by name."""

    def saved_bytes(self) -> int:
        """Return how many bytes `save` writes, about; 0 if that is unknown."""
        return 0

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Load what `save` wrote; raise CheckpointError when anything is missing or differs in shape."""

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write a Hugging Face model directory."""

    def exported_bytes(self) -> int:
        """Return how many bytes the weights have that `export` writes."""
        return sum(spec.num_bytes for spec in self.weight_specs())

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return parameters, dtype, device and similar facts, for tables and logs."""

    def path(self) -> str:
        """Return how an update computes and why, as a part of a sentence; "" if there is nothing to say."""
        return ""

    def warnings(self) -> list[str]:
        """Return lines that the user should see at the start, such as a form of the model that costs more."""
        return []

    def offload(self) -> None:
        """Move weights and optimizer off the device."""

    def onload(self) -> None:
        """Move them back."""


def models_of(*scorers: Any) -> list[BaseBackend]:
    """Return those that are models of this process; of several references each."""
    each = [one for scorer in scorers for one in getattr(scorer, "references", {"": scorer}).values()]
    return [one for one in each if isinstance(one, BaseBackend)]


MAX, WEIGHTED = "/max", "/weighted"
"""The end of a token metric's name says how it becomes one number.

``ratio/max`` is the maximum over the policy's tokens; ``dpo/margin/weighted`` the sum with the weights of the loss, which is
reported as ``dpo/margin``; every other the mean over the policy's tokens.
"""


def of_batch(loss: Tensor, metrics: TokenMetrics, batch: TrainBatch) -> dict[str, float]:
    """Return the "loss", the number of the policy's "tokens", and one number of each metric."""
    mask_BT = batch.mask_BT
    tokens = mask_BT.sum()
    values = [loss, tokens]
    for name, metric_BT in metrics.items():
        metric_BT = metric_BT.detach()
        if name.endswith(MAX):
            values.append(metric_BT.masked_fill(~mask_BT, float("-inf")).max())
        elif name.endswith(WEIGHTED):
            values.append((metric_BT * batch.weights_BT).sum())
        else:
            values.append(metric_BT.masked_fill(~mask_BT, 0.0).sum() / tokens.clamp(min=1))
    names = ["loss", "tokens", *metrics]
    return dict(zip(names, torch.stack([value.double() for value in values]).tolist(), strict=True))


def of_update(parts: Sequence[dict[str, float]], ranks: Ranks) -> dict[str, float]:
    """Return the metrics of an optimizer step from this rank's micro-batches, the same on all ranks.

    The micro-batches of all ranks count as if one rank had them. "tokens" becomes "update/tokens".
    """
    total = _merged(ranks.everyone(_merged(parts)))
    names = {"tokens": "update/tokens"}
    return {names.get(name, name.removesuffix(WEIGHTED)): value for name, value in total.items()}


def _merged(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of several micro-batches together, as those of a single one."""
    tokens = sum(part["tokens"] for part in parts)

    def merge(name: str) -> float:
        if name.endswith(MAX):
            return max(part[name] for part in parts)
        if name in ("loss", "tokens") or name.endswith(WEIGHTED):
            return sum(part[name] for part in parts)
        return sum(part[name] * part["tokens"] for part in parts) / max(tokens, 1)

    return {name: merge(name) for name in parts[0]}
