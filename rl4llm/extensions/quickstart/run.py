"""The quickstart: build a small model, warm it up on demonstrations, train it with GRPO to use its calculator."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shlex import quote

from rl4llm.backends.tiny import build_model, build_tokenizer, save_model
from rl4llm.commands.output import show, table
from rl4llm.compose import build_trainer
from rl4llm.config import Config, load_config
from rl4llm.core.registry import from_extension
from rl4llm.extensions.quickstart.demonstrations import demonstrations
from rl4llm.runs.run_dir import replace_directory, write_atomically
from rl4llm.tracking.tracker import read_jsonl

ONE_CORE: Mapping[str, str | int] = {"threads": 1, "model.autocast": "none"}
"""Trainer and server have a core each."""


def quickstart(directory: Path, *, seed: int, configs: Path, asynchronous: bool = False) -> bool:
    """Run or resume the quickstart in `directory`; return whether it finished, False if it was asked to stop.

    If `asynchronous`, the last of its three parts is another run, for which a server samples while the trainer learns.
    """
    started = time.monotonic()
    model, warm, data = directory / "model", directory / "warm", directory / "data" / "train.jsonl"
    warm_up = _configured(
        configs / "quickstart_warmup.yaml", seed, model, directory / "warmup", {"data.path": str(data)}
    )
    run = directory / ("async" if asynchronous else "grpo")
    grpo = partial(_configured, configs / "quickstart.yaml", seed, warm, run)
    grpo()  # refuses a wrong one before anything starts
    show("1/3  build a small model")
    if not data.exists():
        data.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(data, "".join(json.dumps(row) + "\n" for row in demonstrations(seed)))
    if not model.exists():
        _write_model(model, data, seed)
    show("2/3  warm-up on demonstrations, first clean, then sloppy")
    if not _warm_up(warm_up, warm):
        return False
    show("3/3  train with GRPO")
    with _keys(warm, directory / "server.log", asynchronous) as keys, build_trainer(grpo(keys)) as trainer:
        trainer.train()
        finished = not trainer.stopped
    if finished:
        _show(run, time.monotonic() - started)
    return finished


@contextmanager
def _keys(model: Path, log: Path, asynchronous: bool) -> Iterator[Mapping[str, str | int]]:
    """Yield the keys of an asynchronous run, whose server runs meanwhile, or none."""
    if not asynchronous:
        yield {}
        return
    flags = [str(model), "--port", "0", *(f"{key}={value}" for key, value in ONE_CORE.items())]
    with from_extension("start_server", "--async")("embedded", flags, log=log) as server:
        yield {
            **ONE_CORE,
            "inference.name": "embedded",
            "inference.url": server.url,
            "rollout.max_staleness": 1,
        }


def _configured(
    file: Path, seed: int, model: Path, output: Path, more: Mapping[str, str | int] | None = None
) -> Config:
    """Return the configuration of a file with the keys that the quickstart sets."""
    return load_config(
        file, {"seed": seed, "model.path": str(model), "output.dir": str(output), **(more or {})}
    )


def _write_model(directory: Path, data: Path, seed: int) -> None:
    rows = [json.loads(line) for line in data.read_text().splitlines()[::8]]
    texts = [f"{message['role']}\n{message['content']}\n" for row in rows for message in row["messages"]]
    tokenizer = build_tokenizer(texts)
    replace_directory(directory, lambda scratch: save_model(build_model(tokenizer, seed), tokenizer, scratch))


def _warm_up(config: Config, result: Path) -> bool:
    if result.exists():
        return True
    with build_trainer(config) as trainer:
        trainer.train()
        if trainer.stopped:
            return False
        replace_directory(result, trainer.export)
    return True


def _show(run: Path, seconds: float) -> None:
    """Print the held-out results of a run, where its files are, and the commands to see them."""
    if rows := read_jsonl(run / "eval.jsonl"):  # none with eval.every=0
        lines = [
            (f"{row['step']:g}", f"{row['accuracy']:.1%}", f"{row['reward/mean']:.3f}", f"{row['turns']:.1f}")
            for row in rows
        ]
        show(table("held-out problems, greedy", ("step", "held-out success", "reward", "turns"), lines))
    show(
        f"This start took {seconds / 60:.0f} min. {run} has learning_curve.png, metrics.jsonl, episodes and model.",
        f"tensorboard --logdir {quote(str(run))}",
        f"rl4llm view {quote(str(run))}",
    )
