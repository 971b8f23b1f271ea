"""The log of a run under the names that transformers and TRL log: `trainer.state.log_history` and `metrics`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]

NAMES = {
    "lr": "learning_rate",
    "reward/mean": "reward",
    "groups/zero_spread": "frac_reward_zero_std",
    "completion_length/mean": "completions/mean_length",
    "completion_length/max": "completions/max_length",
    "truncated": "completions/clipped_ratio",
    "clip_fraction": "clip_ratio/region_mean",
    "env/tool_calls": "tools/call_frequency",
    "dpo/accuracy": "rewards/accuracies",
    "dpo/margin": "rewards/margins",
    "dpo/chosen": "rewards/chosen",
    "rm/accuracy": "accuracy",
    "rm/margin": "margin",
    "time/step": "step_time",
}
"""TRL's names of the same numbers, by ours. Names that are not listed stay."""


def renamed(metrics: Mapping[str, Any], prefix: str = "") -> Row:
    """Return metrics under TRL's names; what a script logs with `log_metric` has the name that it gave."""
    return {
        f"{prefix}{_name(name)}": value for name, value in metrics.items() if name not in ("step", "time")
    }


def _name(name: str) -> str:
    kind, _, own = name.partition("/")
    if name in NAMES:
        return NAMES[name]
    if kind == "reward" and own not in ("std", "kl"):
        return f"rewards/{own}/mean"
    return own if kind == "env" else name


def history(rows: Sequence[Row], epochs: float, *, finished: bool) -> list[Row]:
    """Return the rows of metrics.jsonl as `log_history` has them; of a finished run the last one sums it up.

    `epochs` is how many times a step reads the data set.
    """
    logged = []
    for row in rows:
        measured = {name[5:]: value for name, value in row.items() if name.startswith("eval/")}
        found = renamed(measured, "eval_") or renamed(row)
        logged.append(found | {"epoch": epochs * row["step"], "step": row["step"]})
    total = summary(rows, epochs) if finished else {}
    return [*logged, total | {"step": rows[-1]["step"]}] if total else logged


def summary(rows: Sequence[Row], epochs: float) -> Row:
    """Return what `train` of transformers returns as metrics; nothing where no log is, as on other ranks."""
    trained = [row for row in rows if "loss" in row]
    if not trained:
        return {}
    seconds = sum(row["time/step"] for row in trained)
    return {
        "train_runtime": seconds,
        "train_steps_per_second": len(trained) / seconds,
        "train_loss": statistics.fmean(row["loss"] for row in trained if row["loss"] is not None),
        "epoch": epochs * trained[-1]["step"],
    }
