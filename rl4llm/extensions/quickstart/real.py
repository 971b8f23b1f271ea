"""The quickstart with a pretrained model: SmolLM2-135M-Instruct learns sums with GRPO, measured before and after."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from rich.table import Table

from rl4llm.backends.model_files import check_model_path
from rl4llm.compose import build_trainer
from rl4llm.core.errors import ModelError
from rl4llm.extensions.quickstart.directory import mark_directory
from rl4llm.extensions.quickstart.pretrained import smollm2
from rl4llm.extensions.quickstart.run import configured, program, show_files
from rl4llm.extensions.quickstart.sums import write_sums
from rl4llm.runtime.terminal import Terminal
from rl4llm.tracking.tracker import read_jsonl

CONFIG = "recipes/sums/train.yaml"
SHOWN = 5
KEPT = {"checkpoint.every": 5, "checkpoint.keep": 1}
"""A run that is killed repeats at most five steps; each checkpoint has 1.6 GB."""


def quickstart_real(directory: Path, *, seed: int, configs: Path, model: Path | None = None) -> bool:
    """Run or resume the training of `model`, or else of the downloaded one; return whether it finished.

    Raise ModelError for a `model` that is not a model directory, or if none can be downloaded.
    """
    console, started = Terminal(), time.monotonic()
    if model is not None:
        _check(model)
    mark_directory(directory, seed, real=True)
    data, run = directory / "data", directory / "grpo"
    console.rule("1/2  a pretrained model, and sums to train on")
    model = model or smollm2()
    config = configured(configs / CONFIG, seed, model, run, {"data.path": str(data), **KEPT})
    write_sums(data)
    console.rule("2/2  train with GRPO")
    with build_trainer(config) as trainer:
        trainer.train()
        finished = not trainer.stopped
    if finished:
        _show(console, run, time.monotonic() - started)
    return finished


def _check(model: Path) -> None:
    if not model.is_dir():
        raise ModelError(f"--model {model} is not a directory. Accepted: a Hugging Face model directory.")
    check_model_path(model)


def _show(console: Terminal, run: Path, seconds: float) -> None:
    if evaluations := read_jsonl(run / "eval.jsonl"):  # none with eval.every=0
        first, last = evaluations[0], evaluations[-1]
        console.print(_answers(run, first["step"], last["step"]))
        console.print(
            f"Held-out sums solved greedily: {_share(first)} before training, "
            f"{_share(last)} after {last['step']} steps.",
            soft_wrap=True,
            highlight=False,
        )
    command, config = quote(program()), quote(str(run / "config.yaml"))
    show_files(
        console,
        run,
        seconds,
        {
            "measure it": f"{command} eval {config}",
            "export it": f"{command} export {quote(str(run))} --out models/sums",
        },
    )


def _answers(run: Path, first: int, last: int) -> Table:
    """Return a table with what the model answered to the first held-out problems, before and after training."""
    before, after = (
        {row["prompt_id"]: row for row in read_jsonl(run / "episodes" / f"eval-{step:06d}.jsonl")}
        for step in (first, last)
    )
    table = Table("question", "before training", "", f"after {last} steps", "", title="held-out problems")
    for name in [name for name in before if name in after][:SHOWN]:
        question = before[name]["messages"][-2]["content"]
        table.add_row(question, *_answer(before[name]), *_answer(after[name]))
    return table


def _answer(row: Mapping[str, Any]) -> tuple[str, str]:
    said = " ".join(row["messages"][-1]["content"].split())
    return said, "right" if row["success"] else "wrong"


def _share(row: Mapping[str, float]) -> str:
    count = round(row["trajectories"])
    solved = round(row["accuracy"] * count)
    return f"{solved} of {count} ({solved / count:.1%})"
