"""Write the model of a run as a Hugging Face directory with a model card."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import rl4llm
from rl4llm.backends.model_files import check_model_path
from rl4llm.backends.models import load_tokenizer
from rl4llm.backends.source_form import save_tokenizer
from rl4llm.compose import build_algorithm, build_model
from rl4llm.config import Config, as_written, by_part, load_config
from rl4llm.core.errors import ConfigError, ModelError, RunDirError
from rl4llm.core.redact import HIDDEN
from rl4llm.runs.checkpoint import Checkpoint, latest_checkpoint, read_checkpoint
from rl4llm.runs.run_dir import RunDir, replace_directory
from rl4llm.tracking.tracker import read_jsonl

DIRECTORY = re.compile(
    r"""(?:^|(?<=[\s'"=]))[/~][^\s'"<>]*/"""
)  # of a path that begins at the root, or at home
TOLD = ("accuracy", "reward/mean", "loss", "completion_length/mean", "turns")  # of an evaluation


def export(
    run_dir: Path, target: Path, *, step: int | None = None, overrides: Sequence[str] = ()
) -> Checkpoint:
    """Write a checkpoint of a run, the last or that of `step`, as a Hugging Face directory with tokenizer, chat template and
    a model card; an adapter is merged. Returns the checkpoint.

    One process with plain torch does, whatever backend and however many ranks it ran on. `overrides` change keys of its
    configuration, such as a model.path that has moved. Raises RunDirError where there is no run or no such checkpoint.
    """
    run = RunDir(run_dir)
    if not run.config_file.is_file():
        raise RunDirError(
            f"{run_dir} is not a run: {run.config_file.name} is missing. Accepted: the output.dir of a run."
        )
    if target.exists():
        raise ConfigError(f"{target} exists. Next: remove it, or choose another path.")
    checkpoint = _checkpoint(run, step)
    config = replace(load_config(run.config_file, list(overrides), of_run=True), backend={"name": "torch"})
    config = replace(config, model=replace(config.model, path=_model_of(config.model.path, run.path)))
    tokenizer = load_tokenizer(config.model.path, pad_token=config.model.pad_token)
    algorithm = build_algorithm(config)
    model = build_model(config, algorithm, "model")
    model.load(checkpoint.path / "model")
    if algorithm.needs().value_head:
        model.model.config.pad_token_id = tokenizer.pad_token_id

    def write(directory: Path) -> None:
        save_tokenizer(tokenizer, directory)
        model.export(directory)
        card = model_card(config, checkpoint.step, read_jsonl(run.eval_file))
        (directory / "README.md").write_text(card, encoding="utf-8")

    replace_directory(target, write)
    return checkpoint


def _model_of(path: str, run: Path) -> str:
    """Return where the model is that a run started from: a relative path may also count from a directory above the run.

    Raises ModelError if it is in none of them and is not a name on the hub.
    """
    if Path(path).exists():
        return path
    above = next((place / path for place in run.absolute().parents if (place / path).is_dir()), None)
    try:
        return check_model_path(path) if above is None else str(above)
    except ModelError as error:
        raise ModelError(
            f"{error} It is not above {run} either. Next: add model.path=DIRECTORY to the command."
        ) from error


def model_card(config: Config, step: int, evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Return the model card: how the model was trained, and its results on the held-out set."""
    base, name = _shown(config.model.path), str(config.algorithm["name"])
    learned_from = dict.fromkeys(_shown(part.data.path) for part in by_part(config).values())
    head = ["---", "library_name: transformers", f"tags: [rl4llm, {name}]"]
    head += [f"base_model: {base}"] if "/" in base else []
    return "\n".join(
        [
            *head,
            "---",
            f"# {base}, trained with {name}",
            "",
            f"{step} steps of {name} on {', '.join(learned_from)}, by rl4llm {rl4llm.__version__}.",
            "",
            *_results([row for row in evaluations if row["step"] <= step]),
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'path = "."  # the directory of this file, or its name on the hub',
            "model, tokenizer = (kind.from_pretrained(path) for kind in (AutoModelForCausalLM, AutoTokenizer))",
            "```",
            "",
            "The configuration:",
            "",
            "```yaml",
            OmegaConf.to_yaml(_told(as_written(_without_places(config)))).strip(),
            "```",
            "",
        ]
    )


def _checkpoint(run: RunDir, step: int | None) -> Checkpoint:
    if step is None:
        checkpoint = latest_checkpoint(run.checkpoints_dir)
        if checkpoint is None:
            raise RunDirError(
                f"{run.path} has no checkpoint yet. Train for checkpoint.every steps or until the end."
            )
        return checkpoint
    kept = {
        int(path.name.split("-")[1]): path
        for path in run.checkpoints_dir.glob("step-*")
        if path.name[5:].isdigit()
    }
    if step not in kept:
        known = ", ".join(map(str, sorted(kept))) or "none"
        raise RunDirError(f"{run.path} has no checkpoint of step {step}. It has: {known}.")
    return read_checkpoint(kept[step])


def _results(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The first and the last evaluation, as a table."""
    if not rows:
        return
    names = [name for name in TOLD if name in rows[-1]]
    yield "| held-out set | " + " | ".join(f"step {row['step']}" for row in (rows[0], rows[-1])) + " |"
    yield "|---|---|---|"
    for name in names:
        yield f"| {name} | {rows[0].get(name, float('nan')):.4g} | {rows[-1][name]:.4g} |"
    yield ""


def _shown(path: str | None) -> str:
    """A hub name as it is; of a place on this machine its last part alone."""
    if path is None:
        return "prompts of the environment"
    return Path(path).name if Path(path).exists() or path.startswith((".", "/", "~")) else path


def _without_places(config: Config) -> Config:
    """The configuration without what stands for this machine alone."""
    return replace(
        config,
        model=replace(config.model, path=_shown(config.model.path)),
        data=replace(config.data, path=None if config.data.path is None else _shown(config.data.path)),
        eval=replace(config.eval, path=None if config.eval.path is None else _shown(config.eval.path)),
        sync=replace(config.sync, dir=None),
        inference={"name": config.inference["name"]},
        output=replace(config.output, dir=Path(config.output.dir).name),
    )


def _told(value: Any) -> Any:
    """A configuration without what opens doors beside its secrets: variables of programs, addresses, directories."""
    if isinstance(value, Mapping):
        hidden = (
            ("remote", "url", "env") if "command" in value else ("remote", "url")
        )  # addresses, a program's variables
        return {key: HIDDEN if key in hidden and item else _told(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_told(item) for item in value]
    return DIRECTORY.sub("", value) if isinstance(value, str) else value
