"""Runs the proof of every registered method and prints it as a table: nothing in it is typed in.

    python scripts/methods.py [--out runs/methods] [NAME ...]

For each method: how far it is from the numbers of other frameworks (in five layouts) and from loops written from its paper,
how much loss and gradient change when trajectories are arranged otherwise (layouts, micro-batches, order, ranks, longer
observations), and what it learns in a task of two turns. Writes methods.png, the curves.
Exits with 1 if a method fails. The tests in tests/algorithms run the same functions.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "algorithms")]

import golden_numbers  # noqa: E402
import learning  # noqa: E402
from invariance import invariance_error  # noqa: E402
from oracles import ORACLES  # noqa: E402
from recipes import RECIPES  # noqa: E402

from rl4llm.algorithms import ALGORITHMS  # noqa: E402
from rl4llm.core.base_algorithm import Needs  # noqa: E402

BLUE = "#1f6feb"
STORED_WITHIN, ARRANGED_WITHIN = 1e-9, 1e-6
COLUMNS = (
    "method",
    "needs",
    "stored numbers: error",
    "oracles: error",
    "arrangements: error",
    "learned",
    "seconds",
)
MIN_WIDTH = 120
STEPS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """What was found of one method."""

    name: str
    needs: str
    stored: int
    stored_error: float | None
    oracles: int
    oracle_error: float | None
    arranged: int
    arranged_error: float
    measure: str
    rewards: tuple[float, ...]
    before: float
    after: float
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether everything is within its bound."""
        errors = [error for error in (self.stored_error, self.oracle_error) if error is not None]
        exact = bool(errors) and max(errors) < STORED_WITHIN
        return exact and self.arranged_error < ARRANGED_WITHIN and self.after > learning.THRESHOLD

    def row(self) -> list[str]:
        """As a table shows it."""
        return [
            self.name,
            self.needs,
            _shown(self.stored, self.stored_error),
            _shown(self.oracles, self.oracle_error),
            _shown(self.arranged, self.arranged_error),
            f"{self.before:.2f} → {self.after:.2f}",
            f"{self.seconds:.1f}",
        ]


def prove(name: str, directory: Path) -> Proof:
    """Everything of one method."""
    recipe = RECIPES[name]
    stored = golden_numbers.of_method(name)
    errors = [
        golden_numbers.error(entry, name, layout) for entry in stored for layout in golden_numbers.LAYOUTS
    ]
    oracles = [oracle() for oracle in ORACLES.get(name, ())]
    cases = ({}, *recipe.invariance)
    arranged = [invariance_error(name, options) for options in cases]
    curve = learning.learn(name, recipe, directory, steps=STEPS)
    return Proof(
        name=name,
        needs=needs(name),
        stored=len(stored),
        stored_error=max(errors, default=None),
        oracles=len(oracles),
        oracle_error=max(oracles, default=None),
        arranged=len(cases),
        arranged_error=max(arranged),
        measure=recipe.measure,
        rewards=curve.rewards,
        before=curve.before,
        after=curve.after,
        seconds=curve.seconds,
    )


def needs(name: str) -> str:
    """What a method asks of the trainer by default."""
    found, nothing = ALGORITHMS[name]().needs(), Needs()
    asked = [
        item.name
        for item in dataclasses.fields(Needs)
        if getattr(found, item.name) != getattr(nothing, item.name)
    ]
    asked = [found.learns_from if item == "learns_from" else item for item in asked if item != "every_token"]
    return ", ".join(asked).replace("_", " ") or "-"


def table(proofs: list[Proof]) -> Table:
    """For the terminal."""
    made = Table(*COLUMNS, title="every method, proven")
    for proof in proofs:
        made.add_row(*proof.row(), style=None if proof.holds else "bold red")
    return made


def draw(proofs: list[Proof], still: learning.Curve, path: Path) -> None:
    """One small picture for each curve, beside that of a run that does not learn."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    columns = min(7, len(proofs))
    lines = -(-len(proofs) // columns)
    figure, axes = pyplot.subplots(
        lines,
        columns,
        figsize=(2.1 * columns, 1.75 * lines + 0.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, proof in zip(axes.flat, proofs, strict=False):
        axis.set_axis_on()
        axis.axhline(learning.THRESHOLD, color="0.55", linewidth=0.8, linestyle=":")
        if proof.measure == "reward":
            axis.plot(range(1, len(still.rewards) + 1), still.rewards, color="0.75", linewidth=1.2)
        if len(proof.rewards) == 2:  # a method that reads a dataset plays before and after
            axis.plot([1, STEPS], proof.rewards, "o--", color=BLUE, linewidth=1.2, markersize=3)
        else:
            shown = proof.rewards[:STEPS]
            axis.plot(range(1, len(shown) + 1), shown, color=BLUE, linewidth=1.6)
        axis.set_title(proof.name, fontsize=9)
        axis.set_ylim(0, 1)
        axis.set_yticks([0, 0.5, 1])
        axis.set_xticks([1, STEPS // 2, STEPS])
        axis.tick_params(labelsize=7)
        axis.annotate(
            f"{proof.after:.2f}", (0.97, 0.06), xycoords="axes fraction", ha="right", fontsize=8, color=BLUE
        )
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(
        f"Reward over {STEPS} steps (share of vowels in two turns; reward_model: pairs ranked right, above one half)\n"
        "dashed: played before and after learning from a dataset; grey: learning rate 0; dotted: threshold",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="all, if none is given")
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    options = parser.parse_args()
    names = options.names or list(ALGORITHMS)
    console = Console(file=sys.__stdout__)
    console.width = max(console.width, MIN_WIDTH)
    with tempfile.TemporaryDirectory() as scratch, quiet():
        runs = Path(scratch)
        still = learning.learn("grpo", learning.Recipe(), runs / "still", learns=False, steps=STEPS)
        proofs = [
            prove(name, runs / name) for name in track(names, "proving", console=console, transient=True)
        ]
    options.out.mkdir(parents=True, exist_ok=True)
    draw(proofs, still, options.out / "methods.png")
    console.print(table(proofs))
    console.print(
        f"Without learning {still.before:.2f} → {still.after:.2f}, threshold {learning.THRESHOLD}: {options.out}"
    )
    failed = [proof.name for proof in proofs if not proof.holds]
    if failed:
        console.print(f"Failed: {', '.join(failed)}", style="bold red")
    return 1 if failed else 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the runs themselves print."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _shown(count: int, error: float | None) -> str:
    return "-" if error is None else f"{count}: {error:.0e}"


if __name__ == "__main__":
    sys.exit(main())
