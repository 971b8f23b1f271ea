"""``rl4llm train --sweep``: a run for each combination of values, one after another."""

from __future__ import annotations

import itertools
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from shlex import quote
from typing import Any
from urllib.parse import quote as escaped

from rl4llm.commands.output import STOPPED, say, show, table
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError, RL4LLMError
from rl4llm.runs.run_dir import RunDir

GRACE_S = 3600.0  # to finish the current step and save a checkpoint; a second signal ends it at once
ENDS = 5  # steps whose mean reward the table shows
Point = dict[str, str]


def sweep(config: str, overrides: Sequence[str], options: Sequence[str], start: Sequence[str]) -> int:
    """Run `rl4llm START` for each point, and show a table; return 0 if all are done, or `STOPPED` after a signal.

    A point that failed does not end the others. Those that are done are left out, so the same command resumes a sweep.
    """
    from rl4llm.runtime import supervise
    from rl4llm.runtime.watchdog import stop_signals

    fixed, runs = planned(config, overrides, options)
    running: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []
    states = dict.fromkeys((run.path for _, run, _ in runs), "not started")

    def stop(number: int, _: Any) -> None:
        signals.append(number)
        for process in running:
            process.send_signal(signal.SIGTERM if len(signals) == 1 else signal.SIGINT)

    with stop_signals(stop):
        for number, (point, run, is_done) in enumerate(runs, 1):
            if signals:
                break
            if is_done:
                states[run.path] = "done before"
                continue
            say(f"Run {number} of {len(runs)}: {' '.join(_words(point))}")
            words = [*start, config, *fixed, *_words(point), f"output.dir={run.path}"]
            running[:] = [supervise.start([sys.executable, "-m", "rl4llm", *words], {}, GRACE_S)]
            code = running[0].wait()
            ended = "stopped" if signals and not 0 <= code <= 128 else f"failed ({code})"  # while it started
            states[run.path] = {0: "done", STOPPED: "stopped"}.get(code, ended)
    rows = [[*point.values(), states[run.path], *_outcome(run)] for point, run, _ in runs]
    show(
        table("", [*runs[0][0], "state", "step", "held-out", "reward"], rows),
        f"`rl4llm view {quote(str(runs[0][1].path.parent))}` compares them.",
    )
    if signals:
        say("Stopped. The same command resumes the sweep.")
        return STOPPED
    return 0 if all(state.startswith("done") for state in states.values()) else 1


def planned(
    config: str, overrides: Sequence[str], options: Sequence[str]
) -> tuple[list[str], list[tuple[Point, RunDir, bool]]]:
    """Return the overrides of all runs, and each point with its run and whether that is done.

    A key with one value is an override of all. Raise ConfigError for a key or value that is not accepted, or a key twice.
    """
    keys = [word.partition("=")[0] for word in (*options, *overrides)]
    if twice := next((key for key in keys[: len(options)] if keys.count(key) > 1), None):
        raise ConfigError(f"{twice} is swept and set again. Give it once: --sweep {twice}=VALUE,VALUE,...")
    values = {key: _split(texts) for key, _, texts in (option.partition("=") for option in options)}
    fixed = [*overrides, *(f"{key}={texts[0]}" for key, texts in values.items() if len(texts) == 1)]
    swept = {key: dict.fromkeys(texts) for key, texts in values.items() if len(texts) > 1}
    if not swept:
        raise ConfigError(f"--sweep {' '.join(options)} has one point. Accepted: KEY=VALUE,VALUE,...")
    parent = RunDir(load_config(config, fixed).output.dir)
    if parent.run_file.exists():
        raise ConfigError(
            f"output.dir={str(parent.path)!r} is a run, and a sweep needs a directory for several."
        )
    runs = []
    for texts in itertools.product(*swept.values()):
        point = dict(zip(swept, texts, strict=True))
        name = ",".join(f"{key}={escaped(text, safe='')}" for key, text in point.items())
        run = RunDir(parent.path / name)
        loaded = load_config(config, [*fixed, *_words(point), f"output.dir={run.path}"])
        runs.append((point, run, _is_done(run, loaded.values())))
    return fixed, runs


def _split(text: str) -> list[str]:
    """Return the values between commas outside of brackets.

    >>> _split("[a,b],c")
    ['[a,b]', 'c']
    """
    items, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in ")}]")
        if letter == "," and not depth:
            items.append("")
        else:
            items[-1] += letter
    return items


def _words(point: Point) -> list[str]:
    return [f"{key}={value}" for key, value in point.items()]


def _is_done(run: RunDir, values: dict[str, Any]) -> bool:
    """Return whether the last start of a run had this configuration and wrote its model."""
    with suppress(OSError, RL4LLMError):
        if run.model_dir.stat().st_mtime >= run.config_file.stat().st_mtime:
            return load_config(run.config_file, of_run=True).values() == values
    return False


def _outcome(run: RunDir) -> list[Any]:
    """Return the last step, the last held-out success or reward, and the mean reward of the last steps."""
    from rl4llm.tracking.tracker import read_jsonl, rounded

    steps = [row for row in read_jsonl(run.metrics_file) if "tokens/s" in row]
    last: dict[str, Any] = next(reversed(read_jsonl(run.eval_file)), {})
    held_out = last.get("accuracy", last.get("reward/mean", last.get("loss")))
    rewards = [row["reward/mean"] for row in steps if "reward/mean" in row][-ENDS:]
    numbers = (held_out, statistics.fmean(rewards) if rewards else None)
    step = steps[-1]["step"] if steps else None
    return [step, *(None if number is None else rounded(number) for number in numbers)]
