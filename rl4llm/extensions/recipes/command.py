"""``rl4llm recipe run``: repeat a run with published results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4llm.commands.arguments import add_command, add_json, add_overrides
from rl4llm.commands.output import say, show, table, write_json
from rl4llm.core.errors import ConfigError

if TYPE_CHECKING:
    from rl4llm.extensions.recipes.recipe import Recipe
    from rl4llm.extensions.recipes.results import Stored

FAILED = 1


def add(actions: Any) -> None:
    examples = (
        "rl4llm recipe run sums --seed 0 --verify",
        "rl4llm recipe run sums --variant lora model.path=models/SmolLM2-135M-Instruct",
    )
    about = "repeat a recipe, and compare it with its published results"
    command = add_command(actions, "run", run, about, examples, resumes=True)
    command.add_argument("name", help="a recipe, or a directory with recipe.yaml")
    add_overrides(command, "key.sub=value", "override a key of the stages that have {overrides}")
    command.add_argument("--seed", type=int, help="seed of the repetition (default: the recipe's first)")
    command.add_argument("--variant", help="variant to repeat (default: the recipe's first)")
    about = "output directory of all repetitions (default: %(default)s)"
    command.add_argument("--dir", type=Path, default=Path("runs/recipes"), help=about)
    about = f"exit with code {FAILED} if the last result is outside the band of the stored ones, or of another model"
    command.add_argument("--verify", action="store_true", help=about)
    add_json(command)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.recipes.recipe import FILLED, changes, load
    from rl4llm.extensions.recipes.repeat import measured, repeat
    from rl4llm.extensions.recipes.results import directory, outdated, stored
    from rl4llm.extensions.recipes.summary import compared

    recipe = load(arguments.name)
    variant = arguments.variant or next(iter(recipe.variants))
    seed = recipe.seeds[0] if arguments.seed is None else arguments.seed
    # refuses a wrong one before anything is downloaded
    recipe.config([*recipe.overrides(variant), f"seed={seed}", *arguments.overrides])
    if arguments.verify and (other := changes(arguments.overrides)):
        raise ConfigError(
            f"--verify does not accept {' '.join(other)}: the stored results were measured without it. Accepted: overrides "
            f"of {' and '.join(FILLED)}. Next: run it without --verify."
        )
    known = stored(recipe).get(variant)
    if known is None and arguments.verify:
        raise ConfigError(
            f"--verify needs stored results, and recipe {recipe.name} has none of variant {variant}. Next: run it "
            "without --verify."
        )
    if variant in outdated(recipe):
        say(f"The stored results of {recipe.name} ({variant}) were measured with an earlier configuration.")
    work = directory(arguments.dir, recipe, variant, seed)
    stdout = sys.stderr if arguments.json else None
    if code := repeat(recipe, work, variant, seed, arguments.overrides, stdout=stdout):
        return code
    found = measured(recipe, work)
    verdict = compared(recipe, known, seed, found)
    if arguments.json:
        write_json(verdict)
    else:
        _show(recipe, known, verdict, work)
    return FAILED if arguments.verify and not verdict["within_band"] else 0


def _show(recipe: Recipe, known: Stored | None, verdict: dict[str, Any], work: Path) -> None:
    means = dict(known.curve()) if known else {}
    rows = [
        [f"{step:g}", f"{share:.1%}", f"{means[step]:.1%}" if step in means else ""]
        for step, share in verdict["curve"]
    ]
    show(table(f"held-out {recipe.metric}", ("step", "this run", "stored mean"), rows))
    show(*verdict["lines"], f"`rl4llm view {work / 'run'}` shows the run.")
