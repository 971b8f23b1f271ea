"""The quickstart: build a small model, warm it up on demonstrations, let GRPO teach it to use its calculator."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from rich.table import Table

from rl4llm.build import build_trainer
from rl4llm.config import Config, load_config
from rl4llm.core.run_dir import write_atomically
from rl4llm.quickstart.demonstrations import demonstrations
from rl4llm.quickstart.model import build_model, build_tokenizer, save_model


def quickstart(directory: Path, *, seed: int, configs: Path) -> bool:
    """Run or resume all of it in `directory`; returns whether it is finished, False when it was asked to stop."""
    console = Console()
    started = time.monotonic()
    model, warm, data = directory / "model", directory / "warm", directory / "data" / "train.jsonl"
    warm_up = _config(configs / "quickstart_warmup.yaml", seed, model, directory / "warmup", {"data.path": str(data)})
    grpo = _config(configs / "quickstart.yaml", seed, warm, directory / "grpo")
    console.rule("1/3  a small model, from nothing")
    _write_demonstrations(data, seed)
    _write_model(model, data, seed)
    console.rule("2/3  warm-up: imitating demonstrations, most of them sloppy at the end")
    if not _warm_up(warm_up, warm):
        return False
    console.rule("3/3  GRPO: trying, being rewarded, getting better")
    with build_trainer(grpo) as trainer:
        trainer.train()
        finished = not trainer.stopped
    if finished:
        _show(console, directory / "grpo", time.monotonic() - started)
    return finished


def _config(file: Path, seed: int, model: Path, output: Path, more: Mapping[str, str] | None = None) -> Config:
    return load_config(file, {"seed": seed, "model.path": str(model), "output.dir": str(output), **(more or {})})


def _write_demonstrations(path: Path, seed: int) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in demonstrations(seed)))


def _write_model(directory: Path, data: Path, seed: int) -> None:
    if (directory / "tokenizer_config.json").exists():
        return
    rows = [json.loads(line) for line in data.read_text().splitlines()[::8]]
    texts = [f"{message['role']}\n{message['content']}\n" for row in rows for message in row["messages"]]
    tokenizer = build_tokenizer(texts)
    _finished(directory, lambda scratch: save_model(build_model(tokenizer, seed), tokenizer, scratch))


def _warm_up(config: Config, result: Path) -> bool:
    if result.exists():
        return True
    with build_trainer(config) as trainer:
        trainer.train()
        if trainer.stopped:
            return False
        _finished(result, trainer.export)
    return True


def _finished(directory: Path, write: Any) -> None:
    """Write a directory beside its place and rename it, so that it is there only when it is whole."""
    scratch = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    write(scratch)
    scratch.rename(directory)


def _show(console: Console, run: Path, seconds: float) -> None:
    rows = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    table = Table("step", "held-out success", "reward", "turns", title="held-out problems, greedy")
    for row in rows:
        table.add_row(f"{row['step']:g}", f"{row['accuracy']:.1%}", f"{row['reward/mean']:.3f}", f"{row['turns']:.1f}")
    console.print(table)
    names = {
        "learning curve": "learning_curve.png",
        "TensorBoard": "tensorboard",
        "metrics": "metrics.jsonl",
        "episodes": "episodes",
        "model": "model",
    }
    facts: dict[str, object] = {what: run / name for what, name in names.items()}
    facts["this start took"] = f"{seconds:.0f} s"
    facts["look at it"] = f"{quote(_program())} view {quote(str(run))}"
    for what, fact in facts.items():
        console.print(f"{what:>15}: {fact}", soft_wrap=True, highlight=False, markup=False)


def _program() -> str:
    """What to type for `rl4llm`: a script may have put it on its own path only, not on that of the shell."""
    program = Path(sys.argv[0])
    if program.name != "rl4llm":
        return "rl4llm"
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
