"""``rl4llm grade`` shows how the math reward grades a file of answers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rl4llm.commands.arguments import add_command, add_json
from rl4llm.commands.output import show, write_json

if TYPE_CHECKING:
    from rl4llm.extensions.inspect.grade.grade import Graded

EXTRACTIONS = ("auto", "tag", "boxed", "hash", "answer", "last_number")
SEVERAL_BOXED = ("last", "first", "all", "none")
CELL_CHARS = 40


def add(commands: Any) -> None:
    examples = (
        "rl4llm grade answers.jsonl",
        "rl4llm grade good.jsonl --json --several-boxed none",
        "rl4llm grade answers.csv --reply-column completion --answer-column answer --extract boxed",
    )
    about = "show what the math reward extracts from answers, their scores and why"
    command = add_command(commands, "grade", run, about, examples)
    command.add_argument("file", help="rows with a reply and a ground truth: .jsonl, .json, .parquet or .csv")
    command.add_argument(
        "--reply-column",
        metavar="NAME",
        help="text, or messages whose last one of the assistant is the reply (default: reply, else messages)",
    )
    command.add_argument(
        "--answer-column", default="ground_truth", metavar="NAME", help="default: %(default)s"
    )
    command.add_argument(
        "--extract", choices=EXTRACTIONS, default="auto", help="where the answer is (default: %(default)s)"
    )
    command.add_argument(
        "--several-boxed",
        choices=SEVERAL_BOXED,
        default="last",
        help="what counts among different boxed answers (default: %(default)s)",
    )
    add_json(command, "print a line of JSON for each row, for scripts")


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.inspect.grade.grade import counts, grade
    from rl4llm.rewards.math import MathReward

    reward = MathReward(extract=arguments.extract, several_boxed=arguments.several_boxed)
    with closing(reward):
        rows = grade(arguments.file, arguments.reply_column, arguments.answer_column, reward)
    if arguments.json:
        for row in rows:
            write_json(asdict(row))
    else:
        show(*_lines(rows), counts(rows))
    return int(any(row.score is None for row in rows))


def _lines(rows: list[Graded]) -> Iterable[str]:
    """Yield a heading and a line for each row, in columns as wide as their cells; JSON has the whole of a long error."""
    table = [("row", "score", "extracted", "ground truth", "why")]
    table += [
        (row.row, "-" if row.score is None else f"{row.score:g}", _cell(row.extracted, " and "),
         _cell(row.ground_truth, " or "), (row.note or "").partition(" Accepted: ")[0])
        for row in rows
    ]  # fmt: skip
    widths = [max(map(len, cells)) for cells in zip(*(cells[:4] for cells in table), strict=True)]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip()


def _cell(answers: list[str], between: str) -> str:
    text = " ".join(between.join(answers).split()) or "-"
    return text if len(text) <= CELL_CHARS else f"{text[: CELL_CHARS - 3]}..."
