"""What TRL's trainers have besides `train`, `model` and `save_model`: numbers of the run, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rl4llm.commands.output import show
from rl4llm.commands.scratch import scratch_of
from rl4llm.compose import build_trainer
from rl4llm.config import Config
from rl4llm.config.keys import LoraConfig
from rl4llm.core.errors import ConfigError
from rl4llm.tracking.summary import facts, faults, summarize_facts
from rl4llm.tracking.tracker import read_jsonl
from rl4llm.trainers.rl import RLTrainer
from rl4llm_compat.trl import rows
from rl4llm_compat.trl.history import history, renamed, summary

PLAIN = {"name": "reinforce_pp"}
"""A method that needs the policy alone: no critic, no reference, no groups."""

NOT_HERE = {
    "add_callback": "metrics.jsonl has every step; for a custom loop see examples/custom_loop.py",
    "push_to_hub": "the model is in output_dir; upload that, or run the script with `rl4llm run --no-push`",
    "create_model_card": "run.json and config.yaml in output_dir describe the run",
    "predict": "`rl4llm eval` answers held-out prompts",
    "compute_loss": "an algorithm is a class with `token_losses`, see examples/new_algorithm.py",
    "get_train_dataloader": "rows are read by `data`",
}
"""Attributes without a counterpart, and what to use instead."""


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
    """Return the part of accelerate's object that scripts use to print once."""
    ranks, first = trainer.trainer.ranks, _is_first(trainer)
    return SimpleNamespace(
        print=print if first else lambda *values, **options: None,
        is_main_process=first,
        is_local_main_process=first,
        process_index=ranks.rank,
        num_processes=ranks.size,
        wait_for_everyone=ranks.wait,
    )


def _given(trainer: Any, name: str) -> Any:
    """Return the data set of this name that the script gave; streamed rows are a list."""
    return None if trainer._script is None else trainer._script.datasets.get(name)


def _log(trainer: Any, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the rows of one of the run's logs."""
    return read_jsonl(Path(trainer.config.output.dir) / name)


def _epochs(trainer: Any) -> float:
    """Return how many times a step reads the data set; 0 if its size is unknown."""
    count = rows.count(_given(trainer, "train_dataset"))
    return trainer.config.rollout.prompts * trainer.trainer.ranks.size / count if count else 0.0


def _metrics(trainer: Any) -> dict[str, Any]:
    return summary(_log(trainer), _epochs(trainer))


def _state(trainer: Any) -> SimpleNamespace:
    """Where training is; a step is one of the loop."""
    return SimpleNamespace(
        global_step=trainer.trainer.step,
        max_steps=trainer.trainer.schedule.max_steps,
        epoch=_epochs(trainer) * trainer.trainer.step,
        log_history=history(_log(trainer), _epochs(trainer), finished=trainer._trained),
        is_world_process_zero=_is_first(trainer),
    )


def _evaluate(trainer: Any) -> Callable[..., dict[str, float]]:
    def evaluate(eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Return the numbers of the last evaluation, if it was of these weights, or measure a data set.

        Several data sets, by name, are measured one after the other. Raises ConfigError if there is no data set.
        """
        if isinstance(eval_dataset, Mapping):
            return {
                name: value
                for split, given in eval_dataset.items()
                for name, value in evaluate(given, f"{metric_key_prefix}_{split}").items()
            }
        last = _log(trainer, "eval.jsonl")[-1:] if eval_dataset is None else []
        if last and last[0]["step"] == trainer.trainer.step:
            return renamed(last[0], f"{metric_key_prefix}_")
        given = trainer._given.eval_dataset if eval_dataset is None else rows.prepared(eval_dataset)
        if given is None:
            raise ConfigError(
                "trainer.evaluate() has no data set. Next: pass one to it, or eval_dataset to the trainer."
            )
        samples = isinstance(trainer.trainer, RLTrainer)
        measured = _played(trainer, given) if samples else trainer.trainer.measure(given)
        return renamed(measured, f"{metric_key_prefix}_")

    return evaluate


def _played(trainer: Any, dataset: Any) -> dict[str, float]:
    """Have a copy of the policy, with its current weights, answer prompts; return the metrics of the scored answers.

    No file of the run changes. A GPU holds only the copy meanwhile.
    """
    policy, ranks = trainer.trainer.backend, trainer.trainer.ranks
    train_rows = _given(trainer, "train_dataset")
    dataset = rows.READERS.get(trainer.algorithm, rows.as_they_are)(dataset, rows.is_plain(train_rows))
    given = replace(
        trainer._given, model=None, tokenizer=trainer.trainer.tokenizer, dataset=dataset, eval_dataset=dataset
    )
    with scratch_of(trainer.config) as scratch:
        config = _of_evaluation(ranks.share(scratch))  # every rank uses the first one's directory
        trainer.save_pretrained(config.model.path)
        ranks.wait()
        policy.offload()
        try:
            with cast("RLTrainer", build_trainer(config, given)) as other:
                other.step = trainer.trainer.step
                other.publish()
                played = other.play_held_out()
                found = ranks.everyone((facts(played.groups), faults(played.failed)))
        finally:
            policy.onload()
            ranks.wait()
    groups = [group for own, _ in found for group in own]
    return summarize_facts(groups, [sample for _, own in found for sample in own])


def _of_evaluation(config: Config) -> Config:
    """Return the configuration of a run that only evaluates the policy; both are directories in `output.dir`."""
    return replace(
        config,
        algorithm=PLAIN,
        max_steps=0,
        model=replace(config.model, path=f"{config.output.dir}/policy", lora=LoraConfig()),
        data=replace(config.data, limit=None),
        rollout=replace(config.rollout, max_staleness=0),
        eval=replace(config.eval, every=1, path=None, limit=None),
        output=replace(config.output, dir=f"{config.output.dir}/run", console="quiet"),
    )


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
        """Write numbers to ``<split>_results.json`` in `output_dir`; `combined` adds them to all_results.json."""
        _write(trainer, f"{split}_results.json", dict(metrics))
        if combined:
            path = Path(trainer.config.output.dir) / "all_results.json"
            before = json.loads(path.read_text()) if path.exists() else {}
            _write(trainer, path.name, before | dict(metrics))

    return save_metrics


def _write(trainer: Any, name: str, values: Mapping[str, Any]) -> None:
    if _is_first(trainer):
        path = Path(trainer.config.output.dir) / name
        path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")


KNOWN: dict[str, Callable[[Any], Any]] = {
    "accelerator": _accelerator,
    "args": lambda trainer: None if trainer._script is None else trainer._script.args,
    "aux_loss_enabled": lambda trainer: False,  # see router_aux_loss_coef
    "eval_dataset": lambda trainer: _given(trainer, "eval_dataset"),
    "evaluate": _evaluate,
    "global_step": lambda trainer: trainer.trainer.step,
    "is_world_process_zero": lambda trainer: lambda: _is_first(trainer),
    "log_metrics": _log_metrics,
    "metrics": _metrics,
    "processing_class": lambda trainer: trainer.trainer.tokenizer,
    "save_metrics": _save_metrics,
    # what a resumed run needs is in its checkpoints
    "save_state": lambda trainer: lambda: _write(trainer, "trainer_state.json", vars(_state(trainer))),
    "state": _state,
    "tokenizer": lambda trainer: trainer.trainer.tokenizer,
    "train_dataset": lambda trainer: _given(trainer, "train_dataset"),
    "training_loss": lambda trainer: _metrics(trainer).get("train_loss"),
}
