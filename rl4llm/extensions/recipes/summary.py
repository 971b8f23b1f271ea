"""Describe recipes: a row of the list, and how a repetition compares with the stored one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl4llm.extensions.recipes.recipe import Recipe
from rl4llm.extensions.recipes.results import Stored, differences, outdated, stored

COLUMNS = ("name", "variant", "learned", "held-out", "minutes", "memory (GB)", "measured on")


def rows(recipe: Recipe) -> list[list[str]]:
    """Return a row for each variant of a recipe, the first with what is learned; those that were not run are marked."""
    results, old = stored(recipe), outdated(recipe)
    return [
        [
            recipe.name,
            variant,
            "" if place else recipe.learns,
            *_row(recipe, variant, results.get(variant), variant in old),
        ]
        for place, variant in enumerate(recipe.variants)
    ]


def listed(recipe: Recipe) -> list[str]:
    """Return lines for a terminal: what a recipe learns, then each variant with its results."""
    lines = [f"{recipe.name}: {recipe.learns}"]
    for _, variant, _, held_out, minutes, memory, where in rows(recipe):
        facts = [held_out, minutes and f"{minutes} minutes", memory and f"{memory} GB", where]
        lines.append(f"  {variant}: {', '.join(filter(None, facts))}")
    return lines


def _row(recipe: Recipe, variant: str, results: Stored | None, old: bool) -> list[str]:
    if results is None:
        claimed = [item for item in recipe.expected if item["variant"] == variant]
        held_out = (
            f"{spread([claimed[0]['before']])} -> {spread([claimed[0]['after']])} by others"
            if claimed
            else ""
        )
        return [held_out, "", "", f"not run here; needs {recipe.needs}" if recipe.needs else "not run here"]
    runs = list(results.seeds.values())
    minutes = sorted(run["seconds"] / 60 for run in runs)
    machines = [run["machine"] for run in runs]
    threads = _range([str(count) for count in sorted(about["threads"] for about in machines)])
    place = ", ".join(dict.fromkeys(about["gpu"] or about["processor"] for about in machines))
    place += f", {threads} thread{'s' * (threads != '1')}"
    return [
        f"{spread(results.at(0))} -> {spread(results.at(-1))}",
        _range([f"{minutes[0]:.1f}", f"{minutes[-1]:.1f}"]),
        f"{max(run['peak_memory_gb'] for run in runs):.1f}",
        place + (", with an earlier configuration" if old else ""),
    ]


def spread(shares: Sequence[float]) -> str:
    """Return the lowest and highest share in percent; one number if they are equal."""
    return _range([f"{100 * shares[0]:.1f}", f"{100 * shares[-1]:.1f}"]) + " %"


def _range(sorted_texts: list[str]) -> str:
    first, last = sorted_texts[0], sorted_texts[-1]
    return first if first == last else f"{first} to {last}"


def compared(recipe: Recipe, known: Stored | None, seed: int, found: dict[str, Any]) -> dict[str, Any]:
    """Return the curve of a repetition, whether it ends within the band, and whether its weights are equal to the stored
    ones, also as lines of text. Both are None if there is nothing to compare with, or only runs of another model.
    """
    before, after = found["curve"][0][1], found["curve"][-1][1]
    result: dict[str, Any] = {"curve": found["curve"], "within_band": None, "weights_equal": None}
    lines = [f"Held-out {recipe.metric}: {before:.1%} -> {after:.1%} on {found['problems']} problems."]
    if found["overrides"]:
        lines.append(f"This run has overrides: {' '.join(found['overrides'])}.")
    if known is None:
        return result | {"lines": [*lines, "No results of this variant are stored."]}
    if recipe.takes_model and (model := found["machine"]["model"]) not in known.models:
        why = f"this run began with the model {model}, the stored ones with {', '.join(known.models)}"
        return result | {"lines": [*lines, f"Not comparable: {why}."]}
    band = known.band
    result["within_band"] = after in band
    lines.append(
        f"{'Within' if after in band else 'Outside'} the band of {len(known.seeds)} stored seed(s): {band.low:.1%} to "
        f"{band.high:.1%}."
    )
    if seed in known.seeds:
        result["weights_equal"], line = _weights(found, known.seeds[seed])
        lines.append(line)
    return result | {"band": [band.low, band.high], "lines": lines}


def _weights(found: dict[str, Any], known: dict[str, Any]) -> tuple[bool | None, str]:
    if known["weights_sha256"] is None or found["weights_sha256"] is None:
        return None, "The run is not deterministic, so its weights are not compared."
    if found["weights_sha256"] == known["weights_sha256"]:
        return True, f"The weights equal the stored ones of seed {known['seed']} bit for bit."
    apart = differences(found["machine"], known["machine"])
    why = (
        f"This is expected, since these differ: {', '.join(apart)}."
        if apart
        else "Processor name, threads and versions are the same, so code, data or the kind of processor changed."
    )
    return False, f"The weights differ from the stored ones of seed {known['seed']}. {why}"
