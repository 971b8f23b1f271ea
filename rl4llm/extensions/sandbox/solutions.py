"""Try the solutions that rows bring along: where one fails the tests of its row, they are at fault and not the model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.extensions.sandbox import Limits, Program, Sandbox
from rl4llm.extensions.sandbox.code_tests import code_in, program_of, stored_tests
from rl4llm.extensions.sandbox.layouts import Tests

COLUMNS = ("canonical_solution", "solution", "solutions", "code")
MOST_TRIED = 3  # solutions of a row, of which one must pass
MANY = 1000  # rows whose trial is announced, since it takes minutes
Trials = Sequence[tuple[str, Program]]
logger = logging.getLogger(__name__)


class Solutions:
    """Runs the solutions of each row once, and remembers why none passes.

    What `of_rows` finds is kept in the user's cache, so that a run that is resumed leaves out the same rows.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits):
        self.sandbox = sandbox
        self.limits = limits
        self._faults: dict[str, str] = {}
        self._lock = threading.Lock()

    def fault(self, tests: Tests, columns: Mapping[str, Any]) -> str:
        """Return why the tests of a row cannot be trusted; "" if a solution passes them, or the row has none."""
        trials = _trials(tests, columns)
        key = self._key(trials)
        with self._lock:  # samples of one group ask for the same row
            if key not in self._faults:
                self._faults[key] = self._run(trials) or ""
            return self._faults[key]

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """Return the faults of rows by their number; it runs the solutions of all rows that were never tried."""
        trials: dict[str, Trials] = {}
        keys: dict[int, str] = {}
        for number, row in enumerate(rows):
            with contextlib.suppress(DataError):  # `check_row` tells where a dataset may be refused
                trial = _trials(stored_tests(row["ground_truth"], row), row)
                keys[number] = self._key(trial)
                trials[keys[number]] = trial
        cache = Path(os.environ.get("RL4LLM_CACHE") or "~/.cache/rl4llm").expanduser() / "solutions.jsonl"
        self._faults |= _stored(cache)
        new = {key: trial for key, trial in trials.items() if trial and key not in self._faults}
        if len(new) > MANY:
            logger.warning("Trying %d solutions. rewards.code.try_solutions=false skips it.", len(new))
        with ThreadPoolExecutor(self.sandbox.slots, thread_name_prefix="rl4llm-code") as threads:
            for key, fault in zip(new, threads.map(self._run, new.values()), strict=True):
                if fault is not None:
                    self._faults[key] = fault
                    with contextlib.suppress(OSError):  # a home that cannot be written costs another trial
                        cache.parent.mkdir(parents=True, exist_ok=True)
                        with cache.open("a", encoding="utf-8") as lines:
                            lines.write(json.dumps({"key": key, "fault": fault}) + "\n")
        return {number: self._faults[key] for number, key in keys.items() if self._faults.get(key)}

    def _key(self, trials: Trials) -> str:
        content = pickle.dumps((list(trials), self.limits, getattr(self.sandbox, "packages", ())))
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def _run(self, programs: Trials) -> str | None:
        """Return why no solution passes, "" if one does, and None if the sandbox or the tests do not work."""
        reasons: list[str | None] = []
        for column, program in programs:
            outcome = self.sandbox.run(program, self.limits)
            if outcome.status == "ok":
                return ""
            if not outcome.parsed:  # prose is not a solution
                continue
            failed = next((test for test in outcome.tests if not test.passed), None)
            where = f"{failed.name}: {failed.reason}" if failed else outcome.reason
            broken = outcome.status == "infra_error"
            reasons.append(None if broken else f"its own {column} fails its tests ({where[:300]})")
        return reasons[0] if reasons else ""


def solutions_of(columns: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the columns of a row with solutions, and the code of each; a column may hold a list, also as JSON."""
    for column in COLUMNS:
        value = columns.get(column)
        if isinstance(value, str) and value.lstrip()[:1] == "[":
            try:
                value = json.loads(value)
            except ValueError:
                continue  # it is no program either
        for source in value if isinstance(value, list | tuple) else [value]:
            if isinstance(source, str) and source.strip():
                yield column, code_in(source)[0]


def _trials(tests: Tests, columns: Mapping[str, Any]) -> Trials:
    solutions = islice(solutions_of(columns), MOST_TRIED)
    return [(column, program_of(source, tests, columns)) for column, source in solutions]


def _stored(cache: Path) -> dict[str, str]:
    """Return the faults that earlier runs stored; lines that a killed run left incomplete are skipped."""
    faults = {}
    with contextlib.suppress(OSError), cache.open(encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                entry = json.loads(line)
                faults[str(entry["key"])] = str(entry["fault"])
    return faults
