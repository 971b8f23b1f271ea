"""Prints the tables of docs/migration.md, which are those of rl4llm/extensions/trl/table.py; --write puts them into the
page."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

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
    SFT,
)

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
PARTS: tuple[tuple[str, Mapping[str, Alias], Mapping[str, Alias]], ...] = (
    ("Arguments of the trainers", CONSTRUCTOR, {}),
    ("All configs", COMMON, {}),
    ("GRPOConfig, and keywords of PPOTrainer and DAPOTrainer", EPISODES, COMMON),
    ("GRPOConfig alone", GRPO, EPISODES),
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


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        page = PAGE.read_text()
        PAGE.write_text(f"{page.split(BEGIN)[0]}{BEGIN}\n\n{tables()}\n\n{END}{page.split(END)[1]}")
    else:
        print(tables())
