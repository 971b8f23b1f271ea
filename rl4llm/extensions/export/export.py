"""Write the model of a run as a Hugging Face directory with a model card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl4llm.backends.models import load_tokenizer, stored_config
from rl4llm.backends.source_form import save_tokenizer
from rl4llm.compose import build_algorithm, build_model
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError, ModelError, RunDirError
from rl4llm.extensions.export.card import write_card
from rl4llm.runs.checkpoint import Checkpoint, latest_checkpoint, read_checkpoint
from rl4llm.runs.run_dir import RunDir, replace_directory
from rl4llm.runtime.quantized import quantized_layers


def export(
    run_dir: Path,
    target: Path,
    *,
    step: int | None = None,
    overrides: Sequence[str] = (),
    merge: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Checkpoint:
    """Write a checkpoint of a run, the last or that of `step`, as a Hugging Face directory with tokenizer, chat template and
    a model card. Returns the checkpoint.

    An adapter is merged; that of a base in 4 bits is written as a PEFT directory, and merged into the dequantized weights
    only with `merge`. Then `note` gets what rounding costs.

    One process with plain torch does, whatever backend and however many ranks it ran on. `overrides` change keys of its
    configuration, such as a model.path that has moved. Raises RunDirError where there is no run or no such checkpoint.
    """
    run = RunDir(run_dir)
    if not run.config_file.is_file():
        raise RunDirError(
            f"{run_dir} is not a run: config.yaml is missing. Accepted: the output.dir of a run."
        )
    if target.exists():
        raise ConfigError(f"{target} exists. Next: remove it, or choose another path.")
    checkpoint = _checkpoint(run, step)
    config = replace(load_config(run.config_file, list(overrides), of_run=True), backend={"name": "torch"})
    config = replace(config, model=replace(config.model, path=_model_of(config.model.path, run.path)))
    tokenizer = load_tokenizer(config.model.path, pad_token=config.model.pad_token)
    algorithm = build_algorithm(config)
    model: Any = build_model(config, algorithm, "model")  # that of torch
    model.load(checkpoint.path / "model")
    if algorithm.needs().value_head:
        model.model.config.pad_token_id = tokenizer.pad_token_id

    alone = bool(quantized_layers(model.model)) and not merge
    if merge and model.adapter is not None:
        share = model.adapter.lost_by_merging()
        note(f"Merged in {config.model.dtype}: rounding takes {share:.1%} of what the adapter changes.")

    def write(directory: Path) -> None:
        save_tokenizer(tokenizer, directory)
        (model.write_adapter if alone else model.export)(directory)
        write_card(directory, config, checkpoint.step, run)

    replace_directory(target, write, model.exported_bytes)
    return checkpoint


def _model_of(path: str, run: Path) -> str:
    """Return where the model is that a run started from: a relative path may also count from a directory above the run."""
    if Path(path).exists():
        return path
    above = next((place / path for place in run.absolute().parents if (place / path).is_dir()), None)
    if above is not None:
        return str(above)
    try:
        stored_config(path)
        return path
    except ModelError as error:
        raise ModelError(f"{error} Next: add model.path=DIRECTORY to the command.") from error


def _checkpoint(run: RunDir, step: int | None) -> Checkpoint:
    if step is None:
        checkpoint = latest_checkpoint(run.checkpoints_dir)
        if checkpoint is None:
            raise RunDirError(f"{run.path} has no checkpoint yet. Train for checkpoint.every steps.")
        return checkpoint
    names = [path.name for path in run.checkpoints_dir.glob("step-*") if path.name[5:].isdigit()]
    steps = {int(name[5:]): name for name in sorted(names)}
    if step not in steps:
        raise RunDirError(
            f"{run.path} has no checkpoint of step {step}. It has: {', '.join(map(str, steps))}."
        )
    return read_checkpoint(run.checkpoints_dir / steps[step])
