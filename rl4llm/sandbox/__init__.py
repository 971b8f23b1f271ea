"""Sandboxes: where programs that a model wrote are run and judged.

    sandbox.run(Program(source, tests), limits) -> Outcome

The package stands just above `core`, so that rewards, tools and graders can all use it. Read `program.py` (what is run, and
what comes of it), `judge.py` (who compares what, and where), `cell.py` (one sandbox from outside), `_inside.py` (what runs
in it), `levels.py` and `probe.py` (how strong its walls are, and how that is seen), `remote.py` and `serve.py` (the same on
another machine).

    trainer ── supervisor ─┬─ sandbox of the program: functions are called, scripts are run
                           └─ sandbox of the tests, where tests are code
"""

from rl4llm.sandbox.levels import LEVELS
from rl4llm.sandbox.probe import Probe
from rl4llm.sandbox.program import Asserts, Call, Calls, Limits, Outcome, Program, Status, Stdin, Suite, TestResult
from rl4llm.sandbox.sandbox import Runner, Sandbox

__all__ = [
    "LEVELS",
    "Asserts",
    "Call",
    "Calls",
    "Limits",
    "Outcome",
    "Probe",
    "Program",
    "Runner",
    "Sandbox",
    "Status",
    "Stdin",
    "Suite",
    "TestResult",
]
