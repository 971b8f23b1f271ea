"""A generated task: word problems of one or two steps, to be solved with a calculator.

"Ann has 37 coins and gets 48 more, times 3?" has the answer 255. The two splits never share a problem: which one a problem
belongs to is decided by its numbers and operations alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rl4llm.core.errors import ConfigError, unknown
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
SIZE = 16384  # of a split: about half of the held-out problems
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
        result = _apply(self.a, self.op, self.b)
        steps = [(f"{self.a}{self.op}{self.b}", result)]
        if self.op2 is not None and self.c is not None:
            steps.append((f"{result}{self.op2}{self.c}", _apply(result, self.op2, self.c)))
        return steps

    @property
    def answer(self) -> int:
        return self.steps[-1][1]

    @property
    def held_out(self) -> bool:
        number = derive_seed("arithmetic", self.a, self.op, self.b, str(self.op2), str(self.c))
        return number % HELD_OUT_SHARE == 0

    def question(self, choose: random.Random) -> str:
        """Return the problem in words."""
        text = FIRST[self.op] + (SECOND[self.op2] if self.op2 else "") + "?"
        name, things = choose.choice(NAMES), choose.choice(THINGS)
        return text.format(name=name, things=things, a=self.a, b=self.b, c=self.c)


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
    """Return prompts with `messages` and `ground_truth`, 4096 or at most `limit` of them; a split has 16384."""
    count = DEFAULT_LIMIT if limit is None else min(limit, SIZE)
    return [
        {
            "prompt_id": f"arithmetic-{split}-{number}",
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": problem.question(choose)},
            ],
            "ground_truth": str(problem.answer),
        }
        for number, (problem, choose) in enumerate(islice(problems(split, seed), count))
    ]


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
