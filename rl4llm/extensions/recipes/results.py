"""Stored results of a recipe, and how a repetition compares with them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.extensions.recipes.recipe import Recipe

ERRORS = 2  # standard errors on each side of the band


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
        """Return the band of these results, each a share of `problems`; raise DataError for others."""
        shares = sorted(shares)
        check_shares("a stored result", shares)
        low = shares[0] - ERRORS * standard_error(shares[0], problems)
        high = shares[-1] + ERRORS * standard_error(shares[-1], problems)
        return cls(round(max(low, 0.0), 3), round(min(high, 1.0), 3))

    def __contains__(self, share: float) -> bool:
        return self.low <= share <= self.high


def check_shares(name: str, values: Iterable[float]) -> None:
    """Raise DataError for a value outside 0 and 1."""
    for value in values:
        if not 0 <= value <= 1:
            raise DataError(
                f"{name} is {value:g}. Accepted: a share, from 0 to 1. Next: set `metric` in recipe.yaml to one, such as "
                "accuracy."
            )


def standard_error(share: float, problems: int) -> float:
    """Return the standard error of a share of this number of problems; not 0 for a share of 0 or 1."""
    smoothed = (share * problems + 2) / (problems + 4)
    return math.sqrt(smoothed * (1 - smoothed) / problems)


@dataclass(frozen=True)
class Stored:
    """The stored results of a variant: a repetition per seed, as `repeat.measured` returns it."""

    variant: str
    fingerprint: str
    seeds: dict[int, dict[str, Any]]

    @property
    def models(self) -> list[str]:
        """Return the hashes of the models that the runs began with."""
        return sorted({seed["machine"]["model"] for seed in self.seeds.values()})

    @property
    def problems(self) -> int:
        return min(seed["problems"] for seed in self.seeds.values())

    @property
    def band(self) -> Band:
        return Band.of((seed["curve"][-1][1] for seed in self.seeds.values()), self.problems)

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
    if not file.exists():
        return {}
    return {
        variant: Stored(
            variant, found["fingerprint"], {int(seed): run for seed, run in found["seeds"].items()}
        )
        for variant, found in json.loads(file.read_text())["variants"].items()
    }


def outdated(recipe: Recipe) -> list[str]:
    """Return the variants whose results were measured with another configuration than the present one."""
    return [
        variant
        for variant, results in stored(recipe).items()
        if variant not in recipe.variants or results.fingerprint != recipe.fingerprint(variant)
    ]


def differences(found: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """Return what differs between two machines, as text."""
    return [
        f"{name} {found.get(name)} (stored: {known[name]})"
        for name in known
        if found.get(name) != known[name]
    ]


def directory(base: Path, recipe: Recipe, variant: str, seed: int) -> Path:
    """Return the directory of a repetition."""
    return base / recipe.name / variant / f"seed-{seed}"
