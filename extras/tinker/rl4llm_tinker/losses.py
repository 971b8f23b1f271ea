"""Tinker's losses: sums over tokens, from the formulas of `rl4llm.algorithms`.

`target_tokens`, `logprobs` and `advantages` have one number for each position of a datum, and position i says what comes
after `tokens[: i + 1]`. With lp the log-probs of the targets, q those that were given and r = exp(lp - q):

| name | loss of a token | options |
|---|---|---|
| cross_entropy | -weight lp | none |
| importance_sampling | -r A | none |
| ppo | -min(r A, clip(r) A) | clip_low_threshold, clip_high_threshold: bounds of the ratio |
| cispo | -clip(r) A lp, without a gradient of r | the same |
| gspo | as ppo, with the ratio of the sequence | the same |
| dro | -A lp + beta / 2 (lp - q)^2 | beta |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl4llm.algorithms.cispo import CISPO
from rl4llm.algorithms.functional import clipped_surrogate, kl
from rl4llm.algorithms.gspo import GSPOToken
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.types import TrainBatch
from rl4llm_tinker.messages import Datum

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
TARGETS, WEIGHTS, SAMPLED, ADVANTAGES, MASK = (
    "target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask",
)  # fmt: skip
Surrogate = Callable[[TrainBatch, Tensor, Mapping[str, float]], Tensor]
"""(batch, logprobs_BT, options) -> losses_BT."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss by name: what it needs beside the targets, its options with their defaults, and its formula.

    A loss without a formula is a weighted sum of log-probs, for any number of targets at each position.
    """

    needs: tuple[str, ...]
    options: Mapping[str, float]
    surrogate: Surrogate | None = None
    may_have: tuple[str, ...] = ()


def _importance_sampling(batch: TrainBatch, logprobs_BT: Tensor, options: Mapping[str, float]) -> Tensor:
    """Return -r A with the ratio r = p / p_sampled, the policy gradient of samples of another policy."""
    return -(logprobs_BT - batch.old_logprobs_BT).exp() * batch.advantages_BT


def _ppo(batch: TrainBatch, logprobs_BT: Tensor, options: Mapping[str, float]) -> Tensor:
    """Return -min(r A, clip(r) A), equation 7 of PPO (arXiv 1707.06347)."""
    ratio_BT = (logprobs_BT - batch.old_logprobs_BT).exp()
    return clipped_surrogate(ratio_BT, batch.advantages_BT, *_clips(options))


def _cispo(batch: TrainBatch, logprobs_BT: Tensor, options: Mapping[str, float]) -> Tensor:
    """Return -clip(r) A log p, where no gradient flows through clip(r) (MiniMax-M1, arXiv 2506.13585)."""
    low, high = _clips(options)
    return CISPO(clip_low=low, clip_high=high).surrogate(batch, logprobs_BT)[0]


def _gspo(batch: TrainBatch, logprobs_BT: Tensor, options: Mapping[str, float]) -> Tensor:
    """Return the loss of PPO with the mean ratio of a sequence, as GSPO-token (arXiv 2507.18071)."""
    low, high = _clips(options)
    return GSPOToken(clip_low=low, clip_high=high).surrogate(batch, logprobs_BT)[0]


def _dro(batch: TrainBatch, logprobs_BT: Tensor, options: Mapping[str, float]) -> Tensor:
    """Return -A log p + beta (log p - log p_sampled)^2 / 2, the policy loss of DRO (arXiv 2405.19107)."""
    penalty_BT = kl(logprobs_BT, batch.old_logprobs_BT, "k2")
    return options["beta"] * penalty_BT - batch.advantages_BT * logprobs_BT


def _clips(options: Mapping[str, float]) -> tuple[float, float]:
    """Return how far the ratio may be below and above 1."""
    return 1 - options[LOW], options[HIGH] - 1


POLICY = (SAMPLED, ADVANTAGES)
CLIPS = {LOW: 0.8, HIGH: 1.2}
LOSSES = {
    "cross_entropy": Loss((WEIGHTS,), {}),
    "importance_sampling": Loss(POLICY, {}, _importance_sampling),
    "ppo": Loss(POLICY, CLIPS, _ppo),
    "cispo": Loss(POLICY, {LOW: 0.0, HIGH: 1.28}, _cispo),
    "gspo": Loss(POLICY, CLIPS, _gspo, may_have=(MASK,)),
    "dro": Loss(POLICY, {"beta": 0.05}, _dro),
}


def loss_of(name: str, options: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """Return a loss by its name, and its options; raise ConfigError for what it does not have."""
    if name not in LOSSES:
        raise ConfigError(unknown("loss_fn", name, LOSSES))
    loss, numbers = LOSSES[name], {}
    for key, value in options.items():
        if key not in loss.options:
            raise ConfigError(unknown(f"loss_fn_config of {name}", key, loss.options))
        if isinstance(value, str):
            raise ConfigError(f"loss_fn_config: {key}={value!r} is not accepted. Accepted: a number.")
        numbers[key] = value
    return loss, {**loss.options, **numbers}


def check_data(name: str, loss: Loss, data: Sequence[Datum], vocabulary: int, longest: int) -> None:
    """Raise ConfigError for a datum of more than `longest` tokens, or whose tensors are not those of the loss: one finite
    number for each of its targets, which are token ids.
    """
    for number, datum in enumerate(data):
        where, given = f"datum {number} of {len(data)} for loss_fn={name!r}", datum.inputs
        missing = [key for key in (TARGETS, *loss.needs) if key not in given]
        other = sorted(given.keys() - {TARGETS, *loss.needs, *loss.may_have})
        if missing or other:
            what = f"lacks {missing[0]}" if missing else f"has the unknown {other[0]}"
            accepted = ", ".join((TARGETS, *loss.needs, *loss.may_have))
            raise ConfigError(f"{where} {what} in loss_fn_inputs. Accepted: {accepted}.")
        shape, length = given[TARGETS].shape, len(datum.tokens)
        wrong = [key for key, tensor in given.items() if tensor.shape != shape]
        if wrong or not length or (loss.surrogate and len(shape) > 1):
            raise ConfigError(
                f"{where}: {(wrong or [TARGETS])[0]} does not have the form of {length} tokens and {list(shape)} {TARGETS}. "
                f"Accepted: one number for each token{'' if loss.surrogate else ', or K of them'}."
            )
        if length > longest:
            raise ConfigError(
                f"{where} has {length} input tokens. Accepted: the model's context of {longest}, or fewer."
            )
        _check_values(where, datum, vocabulary)


def _check_values(where: str, datum: Datum, vocabulary: int) -> None:
    """Raise ConfigError for numbers that are not finite, and for what is not a token id."""
    targets = datum.inputs[TARGETS]
    if infinite := [key for key, tensor in datum.inputs.items() if not tensor.isfinite().all()]:
        raise ConfigError(f"{where}: {infinite[0]} has NaN or infinite numbers. Accepted: finite ones.")
    if targets.is_floating_point():
        raise ConfigError(f"{where}: {TARGETS} is {targets.dtype}. Accepted: int64 or int32.")
    for what, ids in (("the input", datum.tokens), (TARGETS, targets)):
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ConfigError(
                f"{where}: {what} has a token id outside the vocabulary: 0 to {vocabulary - 1}."
            )


def batch_of(data: Sequence[Datum]) -> TrainBatch:
    """Return the sequences as rows, padded on the right; the mask has every token of theirs.

    Each row has one token more: a batch is computed up to the token before its last one.
    """
    width = 1 + max(len(datum.tokens) for datum in data)

    def rows(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in tensors])

    segments_BT = rows([torch.ones(len(datum.tokens) + 1, dtype=torch.long) for datum in data])
    zeros_BT = torch.zeros(segments_BT.shape)
    batch = TrainBatch(
        token_ids_BT=rows([datum.tokens for datum in data]),
        position_ids_BT=torch.arange(width) * segments_BT,
        segment_ids_BT=segments_BT,
        mask_BT=rows([torch.ones(len(datum.tokens), dtype=torch.bool) for datum in data]),
        sampled_logprobs_BT=zeros_BT,
        credits_BT=zeros_BT,
        weights_BT=zeros_BT,
    )
    if all(SAMPLED in datum.inputs for datum in data):
        batch.old_logprobs_BT = rows([datum.inputs[SAMPLED].float() for datum in data])
        batch.advantages_BT = rows([datum.inputs[ADVANTAGES].float() for datum in data])
    return batch


def total(
    loss: Loss, options: Mapping[str, float], data: Sequence[Datum], batch: TrainBatch, logprobs_M: Tensor
) -> Tensor:
    """Return the sum () of the loss over all targets of the data, whose log-probs are in one row after the other."""
    if loss.surrogate is None:
        weights_M = torch.cat([datum.inputs[WEIGHTS].flatten() for datum in data])
        return -(logprobs_M * weights_M.to(logprobs_M)).sum()
    logprobs_BT = torch.zeros_like(batch.old_logprobs_BT).masked_scatter(batch.mask_BT, logprobs_M)
    if any(MASK in datum.inputs for datum in data):
        counted = [datum.inputs.get(MASK, torch.ones(len(datum.tokens))) > 0 for datum in data]
        counted_BT = torch.zeros_like(batch.mask_BT)
        batch = replace(
            batch, mask_BT=counted_BT.masked_scatter(batch.mask_BT, torch.cat(counted).to(counted_BT))
        )
    losses_BT = loss.surrogate(batch, logprobs_BT, options)
    return losses_BT.masked_fill(~batch.mask_BT, 0.0).sum()
