"""A generated task: word problems of one or two steps, to be solved with a calculator.

"Ann has 37 coins and gets 48 more, times 3?" has the answer 255. The two splits never share a problem: which one a problem
belongs to is decided by its numbers and operations alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl4llm.core.errors import ConfigError, DataError, unknown
from rl4llm.runtime.seeds import derive_seed

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
THINGS = ("coins", "books", "shells", "cards", "apples", "stamps")
FIRST = {
    "+": "{name} has {a} {things} and gets {b} more",
    "-": "{name} has {a} {things} and loses {b}",
    "*": "{name} has {a} boxes of {b} {things}",
}
SECOND = {"+": ", plus {c}", "-": ", minus {c}", "*": ", times {c}"}
SYSTEM = "Use the calculator, one operation per call. Then write: Answer: <number>"
DEFAULT_LIMIT = 4096
LARGEST_LIMIT = 16384  # about half of the held-out problems
HELD_OUT_SHARE = 10  # one problem in this many is held out


@dataclass(frozen=True, slots=True)
class Calculation:
    """a op b, and for two steps (a op b) op2 c."""

    a: int
    op: str
    b: int
    op2: str | None = None
    c: int | None = None

    @property
    def steps(self) -> list[tuple[str, int]]:
        """The calculator's expressions and results, in order."""
        first = _apply(self.a, self.op, self.b)
        steps = [(f"{self.a}{self.op}{self.b}", first)]
        if self.op2 is not None and self.c is not None:
            steps.append((f"{first}{self.op2}{self.c}", _apply(first, self.op2, self.c)))
        return steps

    @property
    def answer(self) -> int:
        return self.steps[-1][1]

    @property
    def held_out(self) -> bool:
        return (
            derive_seed("arithmetic", self.a, self.op, self.b, str(self.op2), str(self.c)) % HELD_OUT_SHARE
            == 0
        )

    def question(self, choose: random.Random) -> str:
        """Return the problem in words."""
        words = {
            "name": choose.choice(NAMES),
            "things": choose.choice(THINGS),
            "a": self.a,
            "b": self.b,
            "c": self.c,
        }
        return (FIRST[self.op] + (SECOND[self.op2] if self.op2 else "") + "?").format(**words)


def problems(split: str, seed: int) -> Iterator[tuple[Calculation, random.Random]]:
    """Yield distinct problems of a split, each with a generator of random numbers.

    It never ends, not even when it has yielded all of them, about 35,000 that are held out and ten times as many others.
    """
    if split not in ("train", "test"):
        raise ConfigError(unknown("data.split", split, ("train", "test")))
    choose = random.Random(derive_seed("arithmetic", split, seed))
    seen: set[Calculation] = set()
    while True:
        problem = _problem(choose)
        if problem not in seen and problem.held_out == (split == "test"):
            seen.add(problem)
            yield problem, choose


def arithmetic_rows(split: str, limit: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Return prompts with `messages` and `ground_truth`, 4096 or `limit` of them.

    Raises DataError for a limit below 1 or above 16384.
    """
    limit = DEFAULT_LIMIT if limit is None else limit
    if not 1 <= limit <= LARGEST_LIMIT:
        raise DataError(
            f"data.limit or eval.limit: {limit} generated prompts are not accepted. Accepted: 1 to {LARGEST_LIMIT}, or null "
            f"for {DEFAULT_LIMIT}."
        )
    rows: list[dict[str, Any]] = []
    for problem, choose in problems(split, seed):
        rows.append(
            {
                "prompt_id": f"arithmetic-{split}-{len(rows)}",
                "messages": [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": problem.question(choose)},
                ],
                "ground_truth": str(problem.answer),
            }
        )
        if len(rows) >= limit:
            return rows
    return rows


def _problem(choose: random.Random) -> Calculation:
    op = choose.choice("+-*")
    a = choose.randint(11, 99)
    b = choose.randint(2, 9) if op == "*" else choose.randint(2, 99)
    if op == "-":
        a, b = max(a, b), min(a, b)
    if choose.random() < 0.5:
        return Calculation(a, op, b)
    op2 = choose.choice("+-*")
    c = choose.randint(2, 9)
    return Calculation(a, op, b, op2, min(c, _apply(a, op, b)) if op2 == "-" else c)


def _apply(left: int, op: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[op]
