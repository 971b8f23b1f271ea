"""What makes a repetition of a recipe comparable: its record, the stored results, and the band in which it must end."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4llm import __version__
from rl4llm.config import load_config
from rl4llm.core.errors import DataError
from rl4llm.extensions.recipes.recipe import Recipe, changes, filled
from rl4llm.tracking.tracker import read_jsonl

RECORD = "recipe.json"
ERRORS = 2  # standard errors on each side of the band
COLUMNS = ("name", "variant", "learned", "held-out", "minutes", "memory (GB)", "measured on")


@dataclass(frozen=True, slots=True)
class Band:
    """The shares in which the last held-out result of a repetition is expected.

    From the lowest result of a stored seed minus two standard errors to the highest plus two, within 0 and 1. The standard
    error of a share p of N problems is sqrt(q (1 - q) / N) with q = (p N + 2) / (N + 4), so it is not 0 where p is 0 or 1.
    Seeds differ, and each result is measured on N problems only: the errors allow for both where few seeds are stored.

    >>> Band.of([0.75, 0.8], 100)
    Band(low=0.664, high=0.879)
    """

    low: float
    high: float

    @classmethod
    def of(cls, shares: Iterable[float], problems: int) -> Band:
        """Return the band of these results, each a share of `problems`."""
        low, *_, high = sorted([*shares] * 2)
        low -= ERRORS * standard_error(low, problems)
        high += ERRORS * standard_error(high, problems)
        return cls(round(max(low, 0.0), 3), round(min(high, 1.0), 3))

    def __contains__(self, share: float) -> bool:
        return self.low <= share <= self.high


def standard_error(share: float, problems: int) -> float:
    """Return the standard error of a share of this number of problems; not 0 for a share of 0 or 1."""
    smoothed = (share * problems + 2) / (problems + 4)
    return math.sqrt(smoothed * (1 - smoothed) / problems)


@dataclass(frozen=True)
class Stored:
    """The stored results of a variant: a repetition per seed, as `measured` returns it."""

    variant: str
    fingerprint: str
    seeds: dict[int, dict[str, Any]]

    @property
    def models(self) -> list[str]:
        """The hashes of the models that the runs began with."""
        return sorted({seed["machine"]["model"] for seed in self.seeds.values()})

    @property
    def band(self) -> Band:
        return Band.of(self.at(-1), min(seed["problems"] for seed in self.seeds.values()))

    def curve(self) -> list[tuple[float, float]]:
        """Return the steps that all seeds have, with the mean of their shares."""
        curves: list[dict[float, float]] = [dict(seed["curve"]) for seed in self.seeds.values()]
        steps = sorted(set.intersection(*map(set, curves)))
        return [(step, statistics.fmean(curve[step] for curve in curves)) for step in steps]

    def at(self, place: int) -> list[float]:
        """Return the shares of all seeds at the first (0) or last (-1) step."""
        return sorted(seed["curve"][place][1] for seed in self.seeds.values())


def stored(recipe: Recipe) -> dict[str, Stored]:
    """Return the stored results of a recipe by variant; {} if there are none."""
    file = recipe.path / "results.json"
    variants = json.loads(file.read_text())["variants"] if file.exists() else {}
    return {
        name: Stored(name, item["fingerprint"], {int(seed): run for seed, run in item["seeds"].items()})
        for name, item in variants.items()
    }


def outdated(recipe: Recipe) -> list[str]:
    """Return the variants whose results were measured with another configuration than the present one."""
    return [
        name
        for name, results in stored(recipe).items()
        if name not in recipe.variants or results.fingerprint != recipe.fingerprint(name)
    ]


def rows(recipe: Recipe) -> list[list[str]]:
    """Return a row for each variant of a recipe, the first with what is learned; those that were not run are marked."""
    results, old = stored(recipe), outdated(recipe)
    table = []
    for place, variant in enumerate(recipe.variants):
        cells = _measured_cells(results[variant]) if variant in results else _claimed_cells(recipe, variant)
        cells[-1] += ", with an earlier configuration" * (variant in old)
        table.append([recipe.name, variant, "" if place else recipe.learns, *cells])
    return table


def _measured_cells(results: Stored) -> list[str]:
    runs = list(results.seeds.values())
    machines = [run["machine"] for run in runs]
    minutes = [run["seconds"] / 60 for run in runs]
    threads = span(sorted(machine["threads"] for machine in machines))
    place = ", ".join(dict.fromkeys(machine["gpu"] or machine["processor"] for machine in machines))
    return [
        f"{percent(results.at(0))} -> {percent(results.at(-1))}",
        span([f"{min(minutes):.1f}", f"{max(minutes):.1f}"]),
        f"{max(run['peak_memory_gb'] for run in runs):.1f}",
        f"{place}, {threads} thread{'s' * (threads != '1')}",
    ]


def _claimed_cells(recipe: Recipe, variant: str) -> list[str]:
    claim = next((claim for claim in recipe.expected if claim["variant"] == variant), None)
    result = f"{percent([claim['before']])} -> {percent([claim['after']])} by others" if claim else ""
    return [result, "", "", "not run here" + f"; needs {recipe.needs}" * bool(recipe.needs)]


def percent(shares: Sequence[float]) -> str:
    """Return the lowest and highest of sorted shares in percent; one number if they are equal."""
    return span([f"{100 * shares[0]:.1f}", f"{100 * shares[-1]:.1f}"]) + " %"


def span(items: Sequence[object]) -> str:
    """Return the first and last item as text, or one of them if they are equal."""
    return f"{items[0]}" if items[0] == items[-1] else f"{items[0]} to {items[-1]}"


def measured(recipe: Recipe, work: Path) -> dict[str, Any]:
    """Return the record of a finished repetition with its held-out curve; raise DataError if that has no shares."""
    record = json.loads((work / RECORD).read_text())
    curve, problems = _curve(recipe, work)
    if not all(0 <= share <= 1 for _, share in curve):
        raise DataError(f"{recipe.metric} is not a share from 0 to 1. Next: set `metric` in recipe.yaml.")
    return record | {
        "curve": curve,
        "problems": problems,
        "seconds": round(record["seconds"]),
        "peak_memory_gb": round(record["peak_memory_gb"], 2),
    }


def _curve(recipe: Recipe, work: Path) -> tuple[list[list[float]], int]:
    """Return the steps with their held-out shares, and the number of held-out problems."""
    files = [Path(filled(text, {"work": work, "run": work / "run"})) for text in recipe.measured]
    if files[0].suffix == ".jsonl":
        lines = [row for row in read_jsonl(files[0]) if recipe.metric in row]
        if not lines:
            raise DataError(
                f"{files[0]} has no {recipe.metric}. Next: set eval.every, or metric in recipe.yaml."
            )
        # of several roles, each has a trajectory of each problem
        counts = [count for name, count in lines[-1].items() if re.fullmatch("role/[^/]+/trajectories", name)]
        problems = int(max(counts, default=lines[-1]["trajectories"]))
        return [[row["step"], row[recipe.metric]] for row in lines], problems
    results = [json.loads(file.read_text()) for file in files]
    shares = [[place, result["scores"][recipe.metric]["value"]] for place, result in enumerate(results)]
    return shares, max(Counter(problem.get("role") for problem in results[-1]["per_problem"]).values())


def provenance(recipe: Recipe, work: Path, model: str) -> dict[str, Any]:
    """Return the hash of the final weights, None if the run was not deterministic, and what they depend on."""
    import torch  # noqa: PLC0415 - after the stages, which need the memory

    from rl4llm.runtime import devices  # noqa: PLC0415 - imports torch

    config = load_config(work / "run" / "config.yaml", of_run=True)
    start = Path(model if recipe.takes_model else config.model.path)
    kind = "cpu" if config.model.device == "cpu" else devices.accelerator()
    return {
        "weights_sha256": _hash(work / "run" / "model") if config.deterministic else None,
        "machine": {
            "model": _hash(start)[:12] if start.is_dir() else str(start),
            "processor": _processor(),
            "gpu": None if kind == "cpu" else devices.properties(kind)[0],
            "threads": config.threads or torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": importlib.metadata.version("transformers"),
            "rl4llm": __version__,
        },
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)", file.read_text(), re.MULTILINE) if file.exists() else None
    return name[1].strip() if name else platform.processor() or platform.machine()


def _hash(directory: Path) -> str:
    """Return the SHA-256 of the weights: of the file if there is one, otherwise of the hashes of all files."""
    hashes = []
    for file in sorted(directory.glob("*.safetensors")):
        with open(file, "rb") as stream:
            hashes.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def compared(recipe: Recipe, results: Stored | None, seed: int, run: dict[str, Any]) -> dict[str, Any]:
    """Return the curve of a repetition, whether it ends within the band, and whether its weights are equal to the stored
    ones, also as lines of text. Both are None if there is nothing to compare with: no stored results, or runs of another
    model or with other overrides.
    """
    before, after = run["curve"][0][1], run["curve"][-1][1]
    verdict: dict[str, Any] = {"curve": run["curve"], "within_band": None, "weights_equal": None}
    lines = [f"Held-out {recipe.metric}: {before:.1%} -> {after:.1%} on {run['problems']} problems."]
    verdict["lines"] = lines
    model = run["machine"]["model"]
    if results is None:
        lines.append("No results of this variant are stored.")
    elif overrides := changes(run["overrides"]):
        lines.append(f"Not comparable: this run has overrides: {' '.join(overrides)}.")
    elif recipe.takes_model and model not in results.models:
        lines.append(
            f"Not comparable: this run began with the model {model}, not {', '.join(results.models)}."
        )
    else:
        band, within = results.band, after in results.band
        verdict |= {"band": [band.low, band.high], "within_band": within}
        where = f"{'Within' if within else 'Outside'} the band of {len(results.seeds)} stored seed(s)"
        lines.append(f"{where}: {band.low:.1%} to {band.high:.1%}.")
        if seed in results.seeds:
            verdict["weights_equal"], line = _weights(run, results.seeds[seed])
            lines.append(line)
    return verdict


def _weights(run: dict[str, Any], stored: dict[str, Any]) -> tuple[bool | None, str]:
    """Return whether the weights are the stored ones, and a line on why they are not."""
    if stored["weights_sha256"] is None or run["weights_sha256"] is None:
        return None, "The run is not deterministic, so its weights are not compared."
    if run["weights_sha256"] == stored["weights_sha256"]:
        return True, f"The weights equal the stored ones of seed {stored['seed']} bit for bit."
    machine = run["machine"]
    differences = [
        f"{name} {machine.get(name)} (stored: {value})"
        for name, value in stored["machine"].items()
        if machine.get(name) != value
    ]
    cause = ", ".join(differences) or "code, data or the kind of processor"
    return False, f"The weights differ from the stored ones of seed {stored['seed']}, as these do: {cause}."
