"""Measure a model on benchmarks by name, see `rl4llm.extensions.evaluate.benchmarks`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rl4llm.compose.environments import Provided, build_rewards, build_sandbox
from rl4llm.compose.setup import Given, Setup
from rl4llm.config import Config, flatten, load_config
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.data.read import read_rows
from rl4llm.extensions.evaluate.benchmarks import BENCHMARKS, Benchmark, Row, digest
from rl4llm.extensions.evaluate.play import Evaluation, evaluate
from rl4llm.extensions.evaluate.scores import Problem, graded_by


@dataclass(frozen=True, slots=True)
class Plan:
    """A benchmark with its rows, and the configuration that plays them."""

    name: str
    benchmark: Benchmark
    config: Config
    rows: list[Row]

    @property
    def changed(self) -> dict[str, Any]:
        """Return the keys that the definition fixes and the user changed; fewer problems are no change."""
        now = flatten(self.config.values())
        fixed = {key: value for key, value in self.benchmark.keys().items() if key != "eval.limit"}
        fixed |= {"data.system_prompt": None, "env.name": "chat"}
        return {key: now[key] for key, value in fixed.items() if now[key] != value}


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of a benchmark; `problems` are graded once for each of its rewards, which the part names."""

    plan: Plan
    evaluation: Evaluation
    problems: list[Problem]

    def about(self) -> dict[str, Any]:
        """Return the definition, and what was measured with it."""
        metrics = self.evaluation.metrics
        return {
            "version": self.plan.benchmark.version,
            "problems": len(self.plan.rows),
            "hash": digest(self.plan.rows),
            "changed": self.plan.changed,
            **self.evaluation.about(),
            "truncated": metrics.get("truncated", 0.0),
            "failures": int(metrics["failures"]),
            "metrics": metrics,
        }


def benchmarks_in(text: str) -> list[str]:
    """Return the benchmarks of ``gsm8k,math500``, and [] for a configuration file; raise ConfigError for anything else."""
    if Path(text).exists() or text.endswith((".yaml", ".yml")):
        return []
    for name in text.split(","):
        BENCHMARKS[name]  # raises ConfigError for an unknown one
    return list(dict.fromkeys(text.split(",")))


def plan(names: Sequence[str], overrides: Sequence[str], data: Sequence[str]) -> list[Plan]:
    """Return what is to be played, with all rows; raise ConfigError or DataError before any model is loaded.

    `data` has the places of rows that are not read from the hub: ``NAME=PATH``, or ``PATH`` alone for one benchmark.
    """
    places, plans = _places(names, data), []
    for name in names:
        benchmark = BENCHMARKS[name]
        fixed = [f"{key}={json.dumps(value)}" for key, value in benchmark.keys().items()]
        config = load_config(None, [*fixed, *overrides])
        source = places.get(name, benchmark.source)
        try:
            rows = benchmark.rows(partial(_read, name, source))
        except KeyError as error:
            raise DataError(f"{name}: a row of {source} has no column {error}.") from error
        plans.append(Plan(name, benchmark, config, rows[: config.eval.limit]))
    for item in plans:
        _check_graders(item.config)
    return plans


def measure(item: Plan, samples: int) -> Measured:
    """Play a benchmark, and grade the episodes with each of its rewards."""
    evaluation = evaluate(
        item.config, samples, Given(dataset=item.rows, eval_dataset=item.rows), of_run=False
    )
    groups = evaluation.played.groups
    problems = [replace(problem, part=item.name) for problem in evaluation.problems]
    for reward in list(groups[0].trajectories[0].rewards)[1:] if groups else ():
        problems += [replace(problem, part=f"{item.name}/{reward}") for problem in graded_by(reward, groups)]
    return Measured(item, evaluation, problems)


def _check_graders(config: Config) -> None:
    """Raise ConfigError for a reward that cannot be made here, before any benchmark is played."""
    provided = Provided({"sandbox": lambda: build_sandbox(config)})
    rewards, _ = build_rewards(Setup.of(config), provided, {})
    for part in (*rewards, *provided.made.values()):
        part.close()


def _read(name: str, source: str, split: str) -> list[Row]:
    try:
        return [row for _, row in read_rows(source, split)]
    except DataError as error:
        raise DataError(f"{name}: {error} A copy: --data {name}=PATH.") from error


def _places(names: Sequence[str], data: Sequence[str]) -> dict[str, str]:
    places = {}
    for text in data:
        name, equals, path = text.partition("=")
        if not equals and len(names) == 1:
            name, path = names[0], text
        if name not in names or not path:
            raise ConfigError(
                f"--data {text} is not accepted. Accepted: NAME=PATH with one of the names {', '.join(names)}."
            )
        places[name] = path
    return places
