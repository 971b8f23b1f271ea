"""Try the solution that a row brings along: where it fails the row's tests, they are at fault and not the model."""

from __future__ import annotations

import hashlib
import json
import pickle
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from rl4llm.extensions.sandbox import Limits, ProgramRunner
from rl4llm.extensions.sandbox.code_tests import FENCE, code_in, program_of
from rl4llm.extensions.sandbox.layouts import Tests

COLUMNS = ("canonical_solution", "solution", "solutions", "code")
MOST_TRIED = 3  # solutions of a row, of which one must pass


class Solutions:
    """Runs each row's solutions once, when a program fails its tests for the first time; it remembers what it found."""

    def __init__(self, sandbox: ProgramRunner, limits: Limits):
        self.sandbox = sandbox
        self.limits = limits
        self._found: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def fault(self, tests: Tests, columns: Mapping[str, Any]) -> str:
        """Return why the tests of a row cannot be trusted; "" if a solution passes them, or the row has none."""
        tried = [(column, program_of(source, tests, columns)) for column, source in solutions_of(columns)]
        if not tried:
            return ""
        key = hashlib.blake2b(pickle.dumps([program for _, program in tried]), digest_size=16).digest()
        with self._lock:  # samples of one group ask for the same row
            if key not in self._found:
                self._found[key] = self._tried(tried)
            return self._found[key]

    def _tried(self, programs: list[Any]) -> str:
        reasons = []
        for column, program in programs:
            outcome = self.sandbox.run(program, self.limits)
            if outcome.status == "ok":
                return ""
            if outcome.parsed and outcome.status != "infra_error":  # prose is not a solution
                failed = next((test for test in outcome.tests if not test.passed), None)
                where = f"{failed.name}: {failed.reason}" if failed else outcome.reason
                reasons.append(f"its own {column} fails its tests ({where[:300]})")
        return reasons[0] if reasons else ""


def solutions_of(columns: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the columns of a row with solutions, and the code of each; a column may hold a list, also as JSON."""
    number = 0
    for column in COLUMNS:
        value = columns.get(column)
        if isinstance(value, str) and value.lstrip()[:1] == "[":
            try:
                value = json.loads(value)
            except ValueError:
                continue
        for source in value if isinstance(value, list | tuple) else [value]:
            if isinstance(source, str) and source.strip() and number < MOST_TRIED:
                number += 1
                yield column, code_in(source)[0] if FENCE in source else source
