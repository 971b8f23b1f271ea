"""The contract of training backends: one model, its optimizer, and one number per token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from rl4llm.core.ranks import Ranks
from rl4llm.core.types import TensorSpec, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TokenMetrics = dict[str, Tensor]
TokenLosses = Callable[[TrainBatch, Tensor, Tensor | None], tuple[Tensor, TokenMetrics]]
"""(batch, logprobs_BT, entropy_BT or None) -> (losses_BT, metrics by name, each (B, T))."""


class TokenScorer(Protocol):
    """What gives each token one number, which is all that is asked of a reference."""

    def forward(self, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
        """As `BaseBackend.forward`."""
        ...


class BaseAdapter(ABC):
    """What trains beside a frozen model, in the form that engines load: an ordinary PEFT directory."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each of its weights, in the order of `specs`."""

    @abstractmethod
    def specs(self) -> list[TensorSpec]:
        """What `weights` will yield."""

    @abstractmethod
    def write_config(self, directory: Path) -> None:
        """Write what an adapter's directory holds beside its weights."""

    @abstractmethod
    def base_digest(self) -> str:
        """A hash of the frozen parameters; an adapter means nothing beside others."""

    @abstractmethod
    def off(self) -> AbstractContextManager[None]:
        """Inside, the frozen model computes alone; nothing is trained meanwhile."""


class BaseBackend(ABC):
    """A model that is trained, and the head that turns its output into one number per token.

    The loss of an optimizer step is the sum of ``losses_BT * batch.weights_BT`` over the `forward_backward` calls since
    the last `optim_step`, on all ranks together; nothing else scales it. A batch whose mask is False everywhere adds exactly
    0: a rank that has fewer than the others gives such ones. Where only an `adapter` trains, `weights` are the merged ones.
    """

    model: PreTrainedModel
    adapter: BaseAdapter | None = None
    whole: bool = True  # whether this rank holds all of the weights, so that an engine in its process can read them in place

    @classmethod
    def shares_weights(cls, ranks: Ranks, options: Mapping[str, Any]) -> bool:
        """Whether each of the ranks will keep a part of every weight only, with these options of a configuration. The model
        then need not be on the device, nor its numbers on any rank but the first, before the backend has it."""
        return False

    @abstractmethod
    def forward(self, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
        """Log-probs (B, T), fp32, no gradient, of each token given those before it; 0 where `mask_BT` is False."""

    @abstractmethod
    def forward_backward(
        self,
        batch: TrainBatch,
        token_losses: TokenLosses,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        last: bool = True,
    ) -> dict[str, float]:
        """Add this batch's gradient; returns "loss", "tokens" (of the policy), and each token metric by its name: the mean
        over those tokens, the maximum where the name ends in "/max", and where it ends in "/weighted" the sum with the
        weights of the loss.

        `entropy` asks for entropy_BT (with gradient), which costs time and is None otherwise. Under `torch.no_grad()` it
        only measures.

        `last` False tells that more batches of this optimizer step follow, so that ranks need not exchange gradients yet;
        with True each time they are the same, only slower. All ranks give as many batches and say the same of them.
        """

    @abstractmethod
    def optim_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, zero the gradients; returns "grad_norm" and "lr".

        A gradient that is not finite skips the step and adds "skipped": 1.0.
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each weight under its Hugging Face name, one at a time, in the order of `weight_specs`."""

    @abstractmethod
    def take_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Copy another model's `weights` into this one's."""

    @abstractmethod
    def weight_specs(self) -> list[TensorSpec]:
        """What `weights` will yield, without having any of it."""

    @abstractmethod
    def write_config(self, directory: Path) -> None:
        """Write what a Hugging Face model directory holds beside its weights."""

    @abstractmethod
    def save(self, directory: Path) -> dict[str, str]:
        """Write weights, optimizer and schedule into an existing directory, as safetensors and JSON; returns the xxh3_64 of
        the files that were hashed on the way, by name."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read back what `save` wrote; raises CheckpointError when anything is missing or differs in shape."""

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write a Hugging Face model directory."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Parameters, dtype, device and the like, for tables and logs."""

    def offload(self) -> None:
        """Move weights and optimizer off the device."""

    def onload(self) -> None:
        """Move them back."""
