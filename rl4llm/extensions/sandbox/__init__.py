"""Sandboxes: where programs that a model wrote are run and judged.

    sandbox.run(Program(source, tests), limits) -> Outcome

Rewards, tools and graders all use it. Read `program.py` (programs and their outcomes), `layouts.py` (tests as datasets
store them), `units.py` (tests that are code), `judge.py` (runs programs and compares results), `cell.py` (one sandbox
from outside), the three `_inside*.py` (the code in it), `packages.py` (what programs may import), `levels.py` and
`probe.py` (isolation levels, and how they are tested), `remote.py` and `serve.py` (the same on another machine).

    trainer ── supervisor ─┬─ sandbox of the program: functions are called, scripts are run
                           └─ sandbox of the tests, where tests are code
"""

from rl4llm.extensions.sandbox.levels import LEVELS
from rl4llm.extensions.sandbox.probe import LevelProbe
from rl4llm.extensions.sandbox.program import (
    Asserts,
    Call,
    Calls,
    Limits,
    Outcome,
    Program,
    Status,
    Stdin,
    Suite,
    TestResult,
)
from rl4llm.extensions.sandbox.sandbox import Sandbox

__all__ = [
    "LEVELS",
    "Asserts",
    "Call",
    "Calls",
    "Limits",
    "Outcome",
    "LevelProbe",
    "Program",
    "Sandbox",
    "Status",
    "Stdin",
    "Suite",
    "TestResult",
]
