"""The split judge: a program in one sandbox, its tests outside or in another, and the comparison here.

A candidate's output counts only as the result of the requested call, under a number that it could not know before. Its
exit code, what it prints besides a script's output and what it does to its process decide nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rl4llm.core.message import shortened
from rl4llm.extensions.sandbox.cell import BrokenTests, Cell, Ended
from rl4llm.extensions.sandbox.program import (
    Asserts,
    Calls,
    Limits,
    Outcome,
    Program,
    Status,
    Stdin,
    Suite,
    TestResult,
)
from rl4llm.extensions.sandbox.units import job_of
from rl4llm.extensions.sandbox.wire import WireError, agrees, decode, encode, same, same_text

if TYPE_CHECKING:
    from rl4llm.extensions.sandbox.supervisor import Station

STATUSES = ("infra_error", "wrong", "model_error", "ok")  # the first one among the tests is the program's
SHOWN = 2000
FLOAT_TOLERANCE = 1e-9  # relative or absolute, of calls that are compared with their types
SHOWN_VALUE = 300  # characters of a value in the message about a failed test
SHOWN_TRACE = 600  # characters of the end of a traceback in it
TESTS_BYTES = 8 * 1024**2  # for one call by the tests, which are trusted but may pass on the program's values


def judge(station: Station, program: Program, limits: Limits) -> Outcome:
    """Run a program and its tests. Raises Ended if the sandbox or the tests do not work."""
    tests = program.tests
    if tests is None:
        return _script(Candidate(station, program, limits, "scripts"))
    if isinstance(tests, Stdin):
        limits = _with_room(limits, [expected for _, expected in tests.cases])
        return _stdin(Candidate(station, program, limits, "scripts"), tests)
    if isinstance(tests, Calls):
        limits = _with_room(limits, [repr(case.expected) for case in tests.cases])
        return _calls(Candidate(station, program, limits, "calls"), tests)
    return _code(station, program, tests, limits)


def _with_room(limits: Limits, expected: Sequence[str]) -> Limits:
    """Raise the output limit to fit the expected answers, in any notation."""
    return replace(limits, output_bytes=max(limits.output_bytes, 8 * max(map(len, expected), default=0)))


class Candidate:
    """The program in its sandbox. After it ends early, it is restarted for the next test while there is time.

    Its time begins when its sandbox, and those that start beside it, are ready.
    """

    def __init__(self, station: Station, program: Program, limits: Limits, role: str, *beside: Cell):
        self.station = station
        self.program = program
        self.limits = limits
        self.role = role
        self.parsed = True
        self.was_asked = False
        self.cell: Cell | None = None
        self._fault: Ended | None = None
        for cell in (self.begin(), *beside):
            cell.await_ready()
        self.deadline = time.monotonic() + limits.total_s

    def begin(self) -> Cell:
        """Start the sandbox without waiting for it."""
        if self.cell is None:
            self.cell = self.station.start(self.limits)
            self._loaded = False
        return self.cell

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request. Raises Ended if there is none."""
        self.was_asked = True
        if self._fault is not None:
            raise self._fault
        if time.monotonic() >= self.deadline:
            raise Ended("model_error", "timeout: no time was left for this test")
        cell = self.begin()
        try:
            if not self._loaded:
                self._load(cell)
            return self._asked(cell, request)
        except Ended:
            self.station.end(cell)
            self.cell = None
            raise

    def printed(self) -> tuple[str, str]:
        """Return the output since the last call as text."""
        if self.cell is None:
            return "", ""
        self.cell.drain()
        out, err = self.cell.printed["out"], self.cell.printed["err"]
        texts = out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
        out.clear()
        err.clear()
        return texts

    def _load(self, cell: Cell) -> None:
        job = {name: getattr(self.program, name) for name in ("source", "prefix", "entry_point", "lends")}
        cell.play(self.role, {**job, "objects": isinstance(self.program.tests, Asserts | Suite)})
        try:
            message = cell.receive(self._until(), "loading the program")
        except Ended as ended:
            self._fault = ended
            raise
        if "loaded" not in message:
            self.parsed = "unparsed" not in message
            self._fault = Ended("model_error", str(message.get("unparsed", message.get("broken")))[:SHOWN])
            raise self._fault
        self._loaded = True

    def _asked(self, cell: Cell, request: dict[str, Any]) -> dict[str, Any]:
        number = secrets.randbits(60)
        until = self._until()
        cell.send({"id": number, **request}, until)
        reply = cell.receive(until)
        if reply.get("id") != number or isinstance(reply["id"], bool):
            raise Ended("model_error", "it answered what it was not asked")
        return reply

    def _until(self) -> float:
        return min(self.deadline, time.monotonic() + self.limits.wall_s)


def _script(candidate: Candidate) -> Outcome:
    out = err = ""
    try:
        reason, out, err = _run_once(candidate, candidate.program.stdin)
    except Ended as ended:
        return Outcome(ended.status, ended.reason, parsed=candidate.parsed)
    return Outcome("model_error" if reason else "ok", reason, (), out, err, candidate.parsed)


def _stdin(candidate: Candidate, tests: Stdin) -> Outcome:
    results = []
    for number, (stdin, expected) in enumerate(tests.cases, 1):
        status: Status = "ok"
        try:
            reason, out, err = _run_once(candidate, stdin)
        except Ended as ended:
            status, reason, trace = ended.status, ended.reason, ended.reason
        else:
            if reason:
                status, trace = "model_error", shortened(err.strip(), SHOWN_TRACE, end=True) or reason
            elif not same_text(out, expected):
                status, reason = "wrong", "the output is another one"
                trace = f"Expected output:\n{_brief(expected)}\nOutput:\n{_brief(out)}"
        message = "" if status == "ok" else f"Input:\n{_brief(stdin)}\n{trace}"
        results.append(TestResult(f"input {number}", status, reason, message))
    return _outcome(results, candidate.parsed)


def _run_once(candidate: Candidate, stdin: str) -> tuple[str, str, str]:
    """Return how a script failed, "" if it did not, and what it printed to standard output and standard error."""
    reply = candidate.ask({"stdin": stdin})
    out, err = candidate.printed()
    if reply.get("exit") == 0:
        return "", out, err
    line = err.strip().rpartition("\n")[2][:300]
    return f"exit status {str(reply.get('exit'))[:20]}: {line}", out, err


def _calls(candidate: Candidate, tests: Calls) -> Outcome:
    results = []
    for number, case in enumerate(tests.cases, 1):
        try:
            request = {"fn": case.fn, "args": encode(list(case.args)), "kwargs": encode(dict(case.kwargs))}
            encode(case.expected)
        except WireError as error:
            raise BrokenTests(f"a test contains something other than a literal: {error}") from None
        try:
            reply = candidate.ask(request)
            status, reason = _compared(reply, case.expected, tests.judge)
        except Ended as ended:
            reply, status, reason = {"ended": ended.reason}, ended.status, ended.reason
        message = f"{_exchange(case.fn, request, reply)}\nExpected: {_brief(repr(case.expected))}"
        results.append(TestResult(f"call {number}", status, reason, message if status != "ok" else ""))
    return _outcome(results, candidate.parsed)


def _exchange(fn: str, request: Mapping[str, Any], reply: Mapping[str, Any]) -> str:
    arguments = [_value(item) for item in request["args"]]
    arguments += [f"{key}={_value(item)}" for key, item in request["kwargs"].get("dict", ())]
    call = f"{fn.lstrip(':')}({_brief(', '.join(arguments))})"
    if "value" in reply:
        return f"{call} returned {_value(reply['value'])}"
    where = f" ({str(reply['where'])[:100]})" if reply.get("where") else ""
    return f"{call}: {_brief(str(reply.get('reason') or reply.get('ended')))}{where}"


def _value(wired: Any) -> str:
    try:
        return _brief(repr(decode(wired)))
    except WireError as error:
        return f"what is no literal: {error}"


def _brief(text: str) -> str:
    return shortened(text.rstrip(), SHOWN_VALUE)


def _compared(reply: dict[str, Any], expected: Any, judge: str) -> tuple[Status, str]:
    if "value" not in reply:
        return "model_error", str(reply.get("reason"))[:SHOWN]
    try:
        value = decode(reply["value"])
    except WireError as error:
        return "model_error", str(error)
    accepted = [expected, *(expected if judge == "wrapped" else ())]
    equal = partial(same, float_tolerance=FLOAT_TOLERANCE) if judge == "exact" else agrees
    if any(equal(value, each) for each in accepted):
        return "ok", ""
    return "wrong", f"another {'type' if type(value) is not type(expected) else 'value'} was expected"


def _code(station: Station, program: Program, tests: Asserts | Suite, limits: Limits) -> Outcome:
    """Run tests that are code in a separate sandbox, and pass their calls on to the program."""
    job = _job(program, tests)
    cell = station.start(replace(limits, output_bytes=max(limits.output_bytes, TESTS_BYTES)))
    candidate = Candidate(station, program, limits, "calls", cell)  # both sandboxes start at the same time
    cell.play("tests", job)
    results: list[TestResult] = []
    plan: list[str] = []
    exchange: tuple[str, Any, Any] | None = None  # call of the running test, with its result
    message: dict[str, Any] = {}
    try:
        while "done" not in message:
            message = cell.receive(min(candidate.deadline, time.monotonic() + limits.wall_s), "a test")
            plan = message.get("plan", plan)
            if "broken" in message:
                raise BrokenTests(f"the tests do not run: {message['broken']}")
            if "test" in message:
                results.append(_result(message, exchange))
                exchange = None
            if "call" in message:
                exchange = message["call"], message, _passed_on(candidate, message)
                cell.send(exchange[2], candidate.deadline)
            cell.beside = list(filter(None, [candidate.cell]))
    except Ended as ended:
        if ended.status == "infra_error":
            raise
        if not plan or not candidate.was_asked:
            raise BrokenTests(f"the tests do not run: {ended.reason}") from None
        rest = [name for name in plan if name not in {result.name for result in results}]
        results += [TestResult(name, ended.status, ended.reason, ended.reason) for name in rest]
    return _outcome(results, candidate.parsed)


def _job(program: Program, tests: Asserts | Suite) -> dict[str, Any]:
    try:
        return job_of(tests, program.entry_point)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenTests(f"the tests do not run: {type(error).__name__}: {error}") from None


def _result(message: Mapping[str, Any], exchange: tuple[str, Any, Any] | None) -> TestResult:
    """Return the result of a test. It can be trusted, since nothing of the program is in the sandbox of the tests."""
    status, reason, call = message["status"], message["reason"], _exchange(*exchange) if exchange else ""
    if status == "ok":
        return TestResult(message["test"], status)
    is_shown = call and (reason == "AssertionError: " or reason.partition(": ")[2] in call)
    lines = (_brief(message.get("source", "")), call, "" if is_shown else _brief(reason))
    return TestResult(message["test"], status, reason, "\n".join(filter(None, lines)))


def _passed_on(candidate: Candidate, message: dict[str, Any]) -> dict[str, Any]:
    try:
        request = {name: message[name] for name in ("args", "kwargs", "changes")}
        reply = candidate.ask({"fn": message["call"], **request})
        literals: tuple[str, ...] = ("value", "args", "kwargs") if message["changes"] else ("value",)
        texts: tuple[str, ...] = ()
        if "value" not in reply:
            literals, texts = ("values", "made"), ("error", "reason", "where")
        values = {name: encode(decode(reply[name])) for name in literals if name in reply}
        facts = {name: str(reply.get(name, ""))[:SHOWN] for name in texts}
        return {**values, **facts, "printed": candidate.printed()}
    except WireError as error:
        return {"error": "TypeError", "reason": str(error)}
    except Ended as ended:
        if ended.status == "infra_error":
            raise
        return {"ended": ended.reason}


def _outcome(results: Sequence[TestResult], parsed: bool) -> Outcome:
    if not results:
        raise BrokenTests("there are no tests, or no assert in them that could fail")
    worst = min(results, key=lambda result: STATUSES.index(result.status))
    return Outcome(worst.status, worst.reason, tuple(results), parsed=parsed)
