"""What TRL's trainers have besides `train`, `model` and `save_model`: numbers of the run, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rl4llm.commands.output import show
from rl4llm.core.errors import ConfigError
from rl4llm.tracking.tracker import read_jsonl

NOT_HERE = {
    "add_callback": "metrics.jsonl has every step; for a custom loop see examples/custom_loop.py",
    "push_to_hub": "the model is in output_dir; upload that, or run the script with `rl4llm run --no-push`",
    "create_model_card": "run.json and config.yaml in output_dir describe the run",
    "predict": "`rl4llm eval` answers held-out prompts",
    "compute_loss": "an algorithm is a class with `token_losses`, see examples/new_algorithm.py",
    "get_train_dataloader": "rows are read by `data`",
}
"""Attributes without a counterpart, and what to use instead."""

ABOUT = ("step", "time")
"""Columns of a log that are not measured."""


def attribute(trainer: Any, name: str) -> Any:
    """Return an attribute of TRL's trainers. Raises AttributeError, and ConfigError for one that is refused by name."""
    if name in NOT_HERE:
        raise ConfigError(f"trainer.{name} has no counterpart in rl4llm. Instead: {NOT_HERE[name]}.")
    if name not in KNOWN:
        raise AttributeError(
            f"{type(trainer).__name__!r} has no attribute {name!r}. Known from TRL: {', '.join(KNOWN)}."
        )
    return KNOWN[name](trainer)


def _is_first(trainer: Any) -> bool:
    return trainer.trainer.ranks.is_first


def _accelerator(trainer: Any) -> SimpleNamespace:
    """The part of accelerate's object that scripts use to print once."""
    ranks, first = trainer.trainer.ranks, _is_first(trainer)
    return SimpleNamespace(
        print=print if first else lambda *values, **options: None,
        is_main_process=first,
        is_local_main_process=first,
        process_index=ranks.rank,
        num_processes=ranks.size,
        wait_for_everyone=ranks.wait,
    )


def _args(trainer: Any) -> Any:
    return None if trainer._script is None else trainer._script.args


def _rows(trainer: Any, name: str) -> list[dict[str, Any]]:
    """Return the rows of one of the run's logs."""
    path = Path(trainer.config.output.dir) / name
    return read_jsonl(path) if path.exists() else []


def _state(trainer: Any) -> SimpleNamespace:
    """Where training is; a step is one of the loop."""
    return SimpleNamespace(
        global_step=trainer.trainer.step,
        max_steps=trainer.config.max_steps,
        log_history=_rows(trainer, "metrics.jsonl"),
        is_world_process_zero=_is_first(trainer),
    )


def _evaluate(trainer: Any) -> Callable[..., dict[str, float]]:
    def evaluate(eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Return the numbers of the last evaluation, which is that of the trained model after `train`."""
        if eval_dataset is not None:
            raise ConfigError(
                "trainer.evaluate(eval_dataset) has no counterpart. Next: pass it to the trainer."
            )
        measured = _rows(trainer, "eval.jsonl")
        if not measured:
            raise ConfigError(
                "trainer.evaluate() found no evaluation. Next: set eval_dataset and eval_strategy='steps', and call it "
                "after train()."
            )
        return {
            f"{metric_key_prefix}_{name}": value for name, value in measured[-1].items() if name not in ABOUT
        }

    return evaluate


def _log_metrics(trainer: Any) -> Callable[..., None]:
    def log_metrics(split: str, metrics: Mapping[str, float]) -> None:
        """Print numbers, one in each line."""
        if _is_first(trainer):
            show(f"***** {split} metrics *****")
            for name, value in sorted(metrics.items()):
                show(f"  {name} = {value:.6g}" if isinstance(value, float) else f"  {name} = {value}")

    return log_metrics


def _save_metrics(trainer: Any) -> Callable[..., None]:
    def save_metrics(split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Write numbers to ``<split>_results.json`` in `output_dir`."""
        if _is_first(trainer):
            path = Path(trainer.config.output.dir) / f"{split}_results.json"
            path.write_text(json.dumps(dict(metrics), indent=1, sort_keys=True) + "\n")

    return save_metrics


KNOWN: dict[str, Callable[[Any], Any]] = {
    "accelerator": _accelerator,
    "args": _args,
    "evaluate": _evaluate,
    "is_world_process_zero": lambda trainer: lambda: _is_first(trainer),
    "log_metrics": _log_metrics,
    "processing_class": lambda trainer: trainer.trainer.tokenizer,
    "save_metrics": _save_metrics,
    "save_state": lambda trainer: lambda: None,  # checkpoints have it
    "state": _state,
    "tokenizer": lambda trainer: trainer.trainer.tokenizer,
}
