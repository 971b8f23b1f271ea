"""How far the engine that sampled and the trainer that learns are apart, measured on the very tokens that train.

Both compute the log-prob of the same token from the same weights; kernels, dtypes and bugs make them differ. Sampling from
one distribution and learning as if from another biases every step, so it is measured in each.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import MismatchError
from rl4llm.core.types import TrainBatch

PREFIX = "mismatch/"
WEIGHT, SQUARE = PREFIX + "weight", PREFIX + "weight_squared"


def token_mismatch(batch: TrainBatch, logprobs_BT: Tensor) -> TokenMetrics:
    """Of each token (B, T): |difference| in nats, its maximum, k3 of KL(engine || trainer), importance weight, its square.

    Only meaningful before the first optimizer step of a rollout, when both hold the same weights.
    """
    difference_BT = logprobs_BT.detach() - batch.sampled_logprobs_BT
    weight_BT = difference_BT.exp()
    return {
        PREFIX + "mean": difference_BT.abs(),
        PREFIX + "max": difference_BT.abs(),
        PREFIX + "k3": weight_BT - 1 - difference_BT,
        WEIGHT: weight_BT,
        SQUARE: weight_BT.square(),
    }


def summarize_mismatch(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of an optimizer step with the importance weights replaced by their effective sample size, as a share.

    The share is mean(w)^2 / mean(w^2) over the tokens (Kong 1992): 1 when engine and trainer agree.
    """
    summary = {name: value for name, value in metrics.items() if name not in (WEIGHT, SQUARE)}
    if WEIGHT in metrics:
        summary[PREFIX + "ess"] = metrics[WEIGHT] ** 2 / max(metrics[SQUARE], 1e-30)
    return summary


def check_mismatch(metrics: Mapping[str, float], stop_above: float | None) -> None:
    """Raise MismatchError when the mean difference is beyond what the user accepts."""
    mean = metrics.get(PREFIX + "mean", 0.0)
    if stop_above is not None and not mean <= stop_above:
        raise MismatchError(
            f"Log-probs of engine and trainer differ by {mean:.3g} nats on average, more than mismatch.stop_above="
            f"{stop_above:g} (largest {metrics[PREFIX + 'max']:.3g}). Training stops before this step is saved. Next: give "
            "both the same dtype, look at the engine's kernels and quantization, or raise the limit."
        )
