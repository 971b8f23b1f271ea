"""Print the tables of docs/metrics.md from rl4llm/tracking/glossary.py; with --write, put them into the page."""

import sys
from pathlib import Path

from rl4llm.tracking.glossary import PREFIXES, Metric, sections

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


def tables() -> str:
    """Return a table for each section, and one of prefixes."""
    prefixes = ["| prefix | what it means |", "|---|---|"]
    prefixes += [f"| `{name}` | {meaning} |" for name, meaning in PREFIXES.items()]
    return "\n\n".join([*map(section, sections()), "\n".join(["## Prefixes", "", *prefixes])])


def section(title: str) -> str:
    """Return one section of the page."""
    head = [f"## {title}", "", "| metric | meaning (unit) | healthy |", "|---|---|---|"]
    return "\n".join([*head, *map(row, sections()[title])])


def row(metric: Metric) -> str:
    """Return one row of a table; the unit follows unless the meaning names it."""
    unit = "" if metric.unit in metric.meaning.lower() else f" ({metric.unit})"
    return f"| `{metric.name}` | {metric.meaning.rstrip('.')}{unit} | {metric.healthy} |"


def main() -> None:
    """Print the tables, or write them into the page."""
    if "--write" not in sys.argv[1:]:
        print(tables())
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
