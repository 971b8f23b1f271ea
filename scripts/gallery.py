"""Store the results of recipes, and write docs/recipes.md and its pictures from what is stored.

    python scripts/gallery.py                        # print what the page has of the recipes
    python scripts/gallery.py --write                # write it into docs/recipes.md, and the pictures beside it
    python scripts/gallery.py --store NAME ...       # store all finished repetitions in --dir, then --write

`rl4llm recipe run NAME --seed N` makes the repetitions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.recipes.recipe import RECIPES, Recipe, changes, load, names
from rl4llm.extensions.recipes.results import Stored, measured, percent, rows, stored
from rl4llm.tracking.curve import INK, style_axes

ROOT = Path(__file__).parents[1]
PAGE, PICTURES = ROOT / "docs" / "recipes.md", ROOT / "docs" / "recipes"
BEGIN, END = "<!-- recipes -->", "<!-- end of recipes -->"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
KEPT = ("seed", "curve", "problems", "seconds", "peak_memory_gb", "weights_sha256", "machine")


def store(recipe: Recipe, base: Path) -> None:
    """Write results.json from all finished repetitions."""
    variants = {
        variant: found for variant in recipe.variants if (found := repetitions(recipe, base, variant))
    }
    if not variants:
        raise ConfigError(f"{base / recipe.name} has no finished repetition of the present configuration.")
    kept = {
        name: {"fingerprint": known.fingerprint, "seeds": known.seeds}
        for name, known in stored(recipe).items()
        if name in recipe.variants and known.fingerprint == recipe.fingerprint(name)
    }
    for variant, runs in variants.items():
        seeds = dict(kept.get(variant, {}).get("seeds", {})) | runs
        kept[variant] = {"fingerprint": recipe.fingerprint(variant), "seeds": dict(sorted(seeds.items()))}
        check_models(recipe, Stored(variant, **kept[variant]))
    ordered = {variant: kept[variant] for variant in recipe.variants if variant in kept}
    (recipe.path / "results.json").write_text(json.dumps({"variants": ordered}, indent=1) + "\n")


def repetitions(recipe: Recipe, base: Path, variant: str) -> dict[int, dict]:
    """Return the finished repetitions of a variant by seed, without those that were made with overrides, except of paths."""
    found = {}
    for record in sorted((base / recipe.name / variant).glob("seed-*/recipe.json")):
        about = json.loads(record.read_text())
        if changes(about["overrides"]) or about["fingerprint"] != recipe.fingerprint(variant):
            print(f"left out, since it had another configuration: {record.parent}")
        elif "weights_sha256" not in about:
            print(f"left out, since it is not finished: {record.parent}")
        else:
            run = measured(recipe, record.parent)
            found[about["seed"]] = {key: run[key] for key in KEPT}
    return found


def check_models(recipe: Recipe, results: Stored) -> None:
    """Raise ConfigError if the seeds of a variant began with different models."""
    if recipe.takes_model and len(results.models) > 1:
        raise ConfigError(
            f"{recipe.name} ({results.variant}) has seeds of different models: {', '.join(results.models)}. Accepted: one "
            "model for all seeds. Next: repeat them with the same model.path."
        )


def page() -> str:
    """Return what the page has of all recipes."""
    recipes = [load(name) for name in names()]
    table = [
        "| recipe | learns | held-out | minutes | GB |",
        "|---|---|---|---|---|",
        *map(overview, recipes),
    ]
    return "\n\n".join(["\n".join(table), machines(recipes), *map(section, recipes)])


def overview(recipe: Recipe) -> str:
    """Return the rows of a recipe: a variant's name follows a link to the section or stands alone."""
    lines = []
    for place, (name, variant, learned, held_out, minutes, memory, where) in enumerate(rows(recipe)):
        cells = [f"[{name}](#{name})"] * (not place) + [variant] * (len(recipe.variants) > 1)
        when = minutes or where.replace("not run here; needs", "needs") * (not place)
        lines.append(f"| {', '.join(cells)} | {learned} | {held_out} | {when} | {memory} |")
    return "\n".join(lines)


def machines(recipes: list[Recipe]) -> str:
    """Return on which machines the recipes were measured."""
    found: dict[str, dict[str, None]] = {}
    for recipe in recipes:
        for known in stored(recipe).values():
            for run in known.seeds.values():
                found.setdefault(machine(run["machine"]), {})[recipe.name] = None
    *some, (where, most) = sorted(found.items(), key=lambda item: len(item[1]))
    both = [name for name in most if any(name in measured for _, measured in some)]
    listed = [f"{', '.join(measured)} on {place}" for place, measured in some]
    listed.append(f"{' and '.join([*both, 'the others'])} on {where}")
    return f"Measured: {'; '.join(listed)}."


def section(recipe: Recipe) -> str:
    """Return the section of a recipe."""
    parts = [f"## {recipe.name}", (recipe.path / "README.md").read_text().strip()]
    if results := stored(recipe):
        parts += [f"![{recipe.title}: {recipe.metric} by step](recipes/{recipe.name}.png)"]
        if not all(run["weights_sha256"] for known in results.values() for run in known.seeds.values()):
            parts += ["Two runs with one seed differ."]
    if recipe.expected:
        parts += ["Published by others:\n\n" + "\n".join(map(claim, recipe.expected))]
    if recipe.plan:
        planned = ", ".join(f"{name} {text}" for name, text in recipe.plan.items())
        parts += [f"Memory by `rl4llm plan`: {planned}."]
    return "\n\n".join(parts)


def machine(about: dict) -> str:
    """Return where a result was measured."""
    threads = f"{about['threads']} thread{'s' * (about['threads'] > 1)}"
    versions = ", ".join(f"{name} {about[name]}" for name in ("python", "torch", "transformers"))
    return f"{about['gpu'] or about['processor']} ({threads}, {versions})"


def claim(item: dict) -> str:
    """Return what others publish, as an item of a list."""
    scores = f"{percent([item['before']])} -> {percent([item['after']])}"
    return f"- {item['variant']}: {scores}. {item['source']}."


def draw(recipe: Recipe, results: dict[str, Stored]) -> None:
    """Draw each seed thin and the mean thick, a colour for each variant; the picture contains what was drawn."""
    figure = Figure(figsize=(8, 3.2), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (variant, known), colour in zip(results.items(), COLOURS, strict=False):
        for run in known.seeds.values():
            steps, shares = zip(*run["curve"], strict=True)
            axes.plot(steps, [100 * share for share in shares], color=colour, alpha=0.35, linewidth=1.1)
        label = f"{variant}, {len(known.seeds)} seed{'s' * (len(known.seeds) > 1)}"
        steps, shares = zip(*known.curve(), strict=True)
        axes.plot(steps, [100 * share for share in shares], "o-", color=colour, linewidth=2.2, label=label)
    style_axes(axes, f"held-out {recipe.metric} (%)")
    axes.set_ylim(0, 100)
    axes.set_xlabel("training step", color=INK)
    axes.set_title(recipe.title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.legend(loc="best", frameon=False, fontsize=9, labelcolor=INK)
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / f"{recipe.name}.png", metadata={"Description": drawn(results)})


def drawn(results: dict[str, Stored]) -> str:
    """Return the curves of a picture as text."""
    return json.dumps(
        {name: {seed: run["curve"] for seed, run in known.seeds.items()} for name, known in results.items()}
    )


def write() -> None:
    """Write the page and the pictures."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{page()}\n\n{END}{rest.partition(END)[2]}")
    for name in names():
        if results := stored(recipe := load(name)):
            draw(recipe, results)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write docs/recipes.md and its pictures")
    parser.add_argument(
        "--store", nargs="+", default=[], metavar="NAME", help=f"recipes of {RECIPES.name}/ to store"
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/recipes"), help="where the repetitions are")
    options = parser.parse_args()
    for name in options.store:
        store(load(name), options.dir)
    if options.write or options.store:
        write()
    else:
        print(page())


if __name__ == "__main__":
    main()
