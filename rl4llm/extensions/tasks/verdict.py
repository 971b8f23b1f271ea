"""What the tests of a task write: a reward, or a report of each test."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree

from rl4llm.core.errors import DataError

LOGS = "/logs/verifier"
REWARDS = ("reward.json", "reward.txt")
"""Files with a reward; the first that exists counts."""

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
REPORTS = ("ctrf.json", "junit.xml")
"""Files with the outcome of each test, in the Common Test Report Format and in JUnit's, which pytest writes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests of an episode said: a reward from 0 to 1, which tests passed, and what they printed."""

    reward: float
    tests: Mapping[str, bool] = field(default_factory=dict)
    output: str = ""
    timed_out: bool = False

    @property
    def printed(self) -> str:
        """Return the end of what the tests printed, on one line."""
        return f"The tests printed: {' '.join(self.output.split())[-200:] or 'nothing'}"


def read_verdict(
    files: Mapping[str, bytes | None], code: int | None, script: str, output: str = ""
) -> Verdict:
    """Return the verdict of tests that ended with `code` and left `files` in /logs/verifier.

    A reward counts before the share of passed tests in a report, and a report before the exit code.
    Raises DataError for a reward outside 0..1, for what decides and cannot be read, and where the reward that the `script`
    names is missing: a full disk must not turn its exit code of 0 into a success.
    """
    reward, tests = None, {}
    try:
        reward = _reward(files)
        tests = _tests(files)
    except (*UNREADABLE, ElementTree.ParseError) as error:
        if reward is None:
            raise DataError(f"what the tests wrote cannot be read: {error!r:.200}.") from error
    if reward is None and any(name in script for name in REWARDS):
        raise DataError(f"the tests left no reward in {LOGS}, which they name.")
    if reward is None:
        reward = sum(tests.values()) / len(tests) if tests else float(code == 0)
    return Verdict(reward, tests, output)


def _reward(files: Mapping[str, bytes | None]) -> float | None:
    """Return the reward of a file, None without one. Raises ValueError and the like."""
    for name in REWARDS:
        if (content := files.get(name)) is not None:
            stored = json.loads(content) if name.endswith(".json") else float(content)
            if isinstance(stored, Mapping):
                stored = stored["reward"] if "reward" in stored else sum(stored.values()) / len(stored)
            if not 0 <= stored <= 1:  # nor NaN
                raise ValueError(f"the reward {stored} is not from 0 to 1")
            return float(stored)
    return None


def _tests(files: Mapping[str, bytes | None]) -> dict[str, bool]:
    """Return whether each test passed that was not skipped; one that is there several times passed each time."""
    tests: dict[str, bool] = {}
    for name, passed in (*_ctrf(files.get("ctrf.json")), *_junit(files.get("junit.xml"))):
        tests[name] = tests.get(name, True) and passed
    return tests


def _ctrf(content: bytes | None) -> Iterator[tuple[str, bool]]:
    for test in json.loads(content)["results"]["tests"] if content is not None else ():
        if test["status"] not in ("skipped", "pending"):
            yield str(test["name"]), test["status"] == "passed"


def _junit(content: bytes | None) -> Iterator[tuple[str, bool]]:
    for case in ElementTree.fromstring(content).iter("testcase") if content is not None else ():
        if case.find("skipped") is None:
            passed = case.find("failure") is None and case.find("error") is None
            yield f"{case.get('classname', '')}.{case.attrib['name']}".lstrip("."), passed
