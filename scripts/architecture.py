"""Draws the rooms of the library and who imports whom: scripts/architecture.py [--write].

Prints docs/architecture.svg, or writes it. A room is a folder of rl4llm/, or the files at its top. An arrow stands for an
import that no chain of other arrows implies: `trainers -> envs -> core` hides `trainers -> core`. Extensions stand apart,
since nothing in the library imports one.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rl4llm"
PICTURE = ROOT / "docs" / "architecture.svg"
FLOORS = (
    ("commands", "testing"),
    ("compose",),
    ("trainers",),
    ("envs", "inference", "sync", "backends", "tracking"),
    ("rewards", "data", "algorithms", "config"),
    ("core", "runs", "runtime"),
)
"""From the top; imports point down, and within a floor only on the ground."""

WIDE, HIGH, GAP, LEFT, TOP = 118, 40, 26, 30, 30
LINES = {  # what a room is for, under its name
    "commands": "rl4llm train, eval ...",
    "compose": "config to trainer",
    "testing": "check your parts",
    "trainers": "one step",
    "envs": "play episodes",
    "inference": "sample tokens",
    "sync": "weight sync",
    "backends": "compute and step",
    "tracking": "logs and curves",
    "rewards": "score",
    "data": "prompts, packing",
    "algorithms": "advantages, losses",
    "config": "keys and ranges",
    "core": "nouns, contracts",
    "runs": "files of a run",
    "runtime": "ranks, threads",
}


def main() -> None:
    picture = draw(imports())
    if "--write" in sys.argv[1:]:
        PICTURE.write_text(picture)
    else:
        print(picture, end="")


def room_of(module: str) -> str:
    """The room of a dotted module; files at the top belong to the command line."""
    first, *rest = module.split(".")[1:] or [""]
    if first == "extensions":
        return f"extensions.{rest[0]}" if rest else ""
    return first if any(first in floor for floor in FLOORS) else "commands"


def imports() -> set[tuple[str, str]]:
    """Return pairs of rooms in which the first imports the second."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        here = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [item.name for item in node.names] if isinstance(node, ast.Import) else []
            found |= {(here, room_of(name)) for name in names if name.startswith("rl4llm.")}
    return {(one, other) for one, other in found if one != other and one and other}


def draw(pairs: set[tuple[str, str]]) -> str:
    """The picture as SVG, the same for the same imports."""
    places = dict(_places())
    level = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    library = {pair for pair in pairs if set(pair) <= set(places) and level[pair[0]] != level[pair[1]]}
    arrows = sorted((one, other) for one, other in library if not _implied(one, other, library))
    width = LEFT * 2 + 5 * WIDE + 4 * GAP
    extensions = sorted(
        {one.removeprefix("extensions.") for one, _ in pairs if one.startswith("extensions.")}
    )
    rows = [extensions[start : start + 5] for start in range(0, len(extensions), 5)]
    base = TOP + len(FLOORS) * (HIGH + 50)
    height = base + 40 + len(rows) * (HIGH - 4)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<title>The rooms of rl4llm and who imports whom</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#64748b"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    parts += [_arrow(places[one], places[other]) for one, other in arrows]
    parts += [_box(*place, name, LINES[name], "#e0f2fe") for name, place in places.items()]
    parts.append(
        f'<rect x="{LEFT - 12}" y="{base}" width="{width - 2 * LEFT + 24}" height="{height - base - 12}" rx="8" '
        'fill="#fafaf9" stroke="#a8a29e" stroke-dasharray="5 4"/>'
        f'<text x="{LEFT}" y="{base + 19}" font-size="12" fill="#57534e">extensions: they import the library, '
        "the library finds them by name</text>"
    )
    for row, names in enumerate(rows):
        for column, name in enumerate(names):
            x, y = LEFT + column * (WIDE + GAP), base + 28 + row * (HIGH - 4)
            parts.append(_box(x, y, name, "", "#fef3c7", high=HIGH - 12))
    return "\n".join([*parts, "</svg>", ""])


def _places() -> list[tuple[str, tuple[int, int]]]:
    """The left upper corner of each room, floors centred one above the other."""
    whole = 5 * WIDE + 4 * GAP
    return [
        (name, (LEFT + (whole - len(floor) * WIDE - (len(floor) - 1) * GAP) // 2 + number * (WIDE + GAP), y))
        for floor, y in zip(FLOORS, range(TOP, 10**4, HIGH + 50), strict=False)
        for number, name in enumerate(floor)
    ]


def _implied(one: str, other: str, pairs: set[tuple[str, str]]) -> bool:
    """Whether a longer chain of imports leads from one room to the other, through floors between them."""
    level = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    middle = [b for a, b in pairs if a == one and level[one] < level[b] < level[other]]
    return any((step, other) in pairs or _implied(step, other, pairs) for step in middle)


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    """From the lower edge of one box to the upper edge of the other."""
    (x1, y1), (x2, y2) = start, end
    x1, y1, x2 = x1 + WIDE // 2, y1 + HIGH, x2 + WIDE // 2
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#94a3b8" marker-end="url(#tip)"/>'


def _box(x: int, y: int, name: str, line: str, fill: str, high: int = HIGH) -> str:
    middle = x + WIDE // 2
    texts = f'<text x="{middle}" y="{y + 17}" font-size="13" font-weight="bold">{name}</text>'
    if line:
        texts += f'<text x="{middle}" y="{y + 32}" font-size="10" fill="#475569">{line}</text>'
    return (
        f'<rect x="{x}" y="{y}" width="{WIDE}" height="{high}" rx="6" fill="{fill}" stroke="#64748b"/>'
        f'<g text-anchor="middle">{texts}</g>'
    )


if __name__ == "__main__":
    main()
