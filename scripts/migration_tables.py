"""Prints the tables of docs/migration.md: TRL's of rl4llm/extensions/trl/table.py, and those of the other projects, the keys
of rl4llm/extensions/migration and the snippets that its tests run. --write puts them into the page."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from rl4llm.extensions.migration.projects import PROJECTS
from rl4llm.extensions.migration.row import Row
from rl4llm.extensions.trl.alias import Alias
from rl4llm.extensions.trl.table import (
    ANSWERS,
    COMMON,
    CONSTRUCTOR,
    DPO,
    EPISODES,
    GRPO,
    KTO,
    PPO,
    REWARD,
    RLOO,
    SFT,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "migration.md"
SNIPPETS = ROOT / "tests" / "extensions" / "migration" / "snippets.yaml"
PARTS: tuple[tuple[str, Mapping[str, Alias], Mapping[str, Alias]], ...] = (
    ("Arguments of the trainers", CONSTRUCTOR, {}),
    ("All configs", COMMON, {}),
    ("GRPOConfig, and keywords of PPOTrainer and DAPOTrainer", EPISODES, COMMON),
    ("GRPOConfig alone", GRPO, EPISODES),
    ("RLOOConfig alone", RLOO, EPISODES),
    ("Keywords of PPOTrainer alone", PPO, EPISODES),
    ("DPOConfig, KTOConfig, RewardConfig and SFTConfig", ANSWERS, COMMON),
    ("DPOConfig alone", DPO, ANSWERS),
    ("KTOConfig alone", KTO, ANSWERS),
    ("RewardConfig alone", REWARD, ANSWERS),
    ("SFTConfig alone", SFT, ANSWERS),
)
"""A title, a table, and the one that it was made from, whose names are shown there."""


def tables() -> str:
    own = [
        (title, {name: alias for name, alias in table.items() if base.get(name) is not alias})
        for title, table, base in PARTS
    ]
    return "\n\n".join(section(title, table) for title, table in own)


def section(title: str, table: Mapping[str, Alias]) -> str:
    spoken = [(name, alias) for name, alias in table.items() if alias.kind in ("key", "joint")]
    refused = [(name, alias) for name, alias in table.items() if alias.kind == "refused"]
    parts = [
        ("| TRL | its default | rl4llm |", [row(*item) for item in spoken]),
        ("| refused, except its default | its default | instead |", [row(*item) for item in refused]),
        ("| ignored, with a warning | | why |", list(silent(table))),
    ]
    shown = ["\n".join([head, "|---|---|---|", *rows]) for head, rows in parts if rows]
    return "\n\n".join([f"### {title}", *shown])


def row(name: str, alias: Alias) -> str:
    return f"| `{name}` | `{alias.default!r}` | {alias.says} |"


def silent(table: Mapping[str, Alias]) -> Iterator[str]:
    """A row for each reason."""
    names: dict[str, list[str]] = {}
    for name, alias in table.items():
        if alias.kind == "inert":
            names.setdefault(alias.says, []).append(f"`{name}`")
    for says, those in names.items():
        yield f"| {', '.join(those)} | | {says} |"


def of_projects() -> dict[str, str]:
    """Return the tables of the projects beside TRL, by the mark in the page: snippets and keys."""
    snippets = yaml.safe_load(SNIPPETS.read_text(encoding="utf-8"))
    found = {f"snippets of {name}": _snippets(rows) for name, rows in snippets.items()}
    return found | {f"keys of {project.name}": _keys(project.rows) for project in PROJECTS}


def _snippets(rows: list[dict[str, str]]) -> str:
    lines = ["| you write | here |", "|---|---|"]
    for item in rows:
        given = item.get("shown") or next(iter(item.values()))
        lines.append(f"| `{given.strip()}` | {item['here']} |")
    return "\n".join(lines)


def _keys(rows: Mapping[str, Row]) -> str:
    """Return two tables: keys with a counterpart, and keys without one; those with the same answer share a line."""
    grouped: dict[Row, list[str]] = {}
    for name, item in rows.items():
        if not name.startswith("--") and name not in ("method.name", "launch.nproc"):
            grouped.setdefault(Row(item.ours, item.note), []).append(f"`{name.removeprefix('method.')}`")
    parts = [
        ("| key | rl4llm |", [(names, str(item)) for item, names in grouped.items() if item.ours]),
        (
            "| key without a counterpart | why |",
            [(names, item.note) for item, names in grouped.items() if not item.ours],
        ),
    ]
    return "\n\n".join(
        "\n".join([head, "|---|---|", *(f"| {', '.join(names)} | {says} |" for names, says in lines)])
        for head, lines in parts
        if lines
    )


def _with(page: str, mark: str, text: str) -> str:
    """Return the page with a text between the two marks."""
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    return f"{page.split(begin)[0]}{begin}\n\n{text}\n\n{end}{page.split(end)[1]}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        page = _with(PAGE.read_text(), "tables", tables())
        for mark, text in of_projects().items():
            page = _with(page, mark, text)
        PAGE.write_text(page)
    else:
        print(
            "\n\n".join([tables(), *(f"<!-- {mark} -->\n\n{text}" for mark, text in of_projects().items())])
        )
