"""What runs in a sandbox, how much of the machine it may use, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rl4llm.core.schema import Count, Positive, check_fields

Status = Literal["ok", "wrong", "model_error", "infra_error"]
"""ok: all tests passed, or the script ran. wrong: the program's answer failed a test. model_error: the program does not
parse, crashed, hung or used too much. infra_error: the sandbox or the tests did not work, whatever the program was."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function of the program, and the value that it must return, including its type.

    `fn` is a name, or ``Class.method``, whose class is created without arguments. A name that only the program's class
    `Solution` has is its method.
    """

    fn: str
    args: tuple[Any, ...]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Calls:
    """Function-call tests. Values are Python literals.

    Judge "exact" compares types too; floats may differ by 1e-9, relative or absolute. "json" compares as the judges of
    LiveCodeBench and APPS: tuples are lists, 2.0 is 2, and floats may differ as `wire.agrees` says. "wrapped" also
    accepts the only element of each expected list.
    """

    cases: tuple[Call, ...]
    judge: Literal["exact", "json", "wrapped"] = "exact"


@dataclass(frozen=True, slots=True)
class Stdin:
    """Tests of a whole program: pairs of its input and the output that it must print.

    `wire.same_text` says which outputs are equal.
    """

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Asserts:
    """Tests that are code: assert statements, or a function ``check(candidate)`` as in HumanEval.

    Each statement that contains an assert is a test. `setup` runs before them. Names that neither it nor the tests
    define are the program's functions. Without such a name, the only builtin that the tests call is the program's
    function.

    The tests and the program run in two processes, which exchange values of literals, decimals, fractions and dates.
    Iterators are read as far as the tests read them. A function's changes to its arguments reach the tests if it returns
    None or the test drops what it returns.
    """

    tests: tuple[str, ...]
    entry_point: str = ""
    setup: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """Test files by name, and the ids that must pass: ``test_x.py::test_a`` or ``test_x.py::TestB::test_c``.

    The files import the program's functions by ``from solution import f``. Functions and methods of
    ``unittest.TestCase`` and of plain classes are supported. A test that fails before it calls the program, as one that
    is missing, is a fault of the tests.
    """

    files: Mapping[str, str]
    required: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Untrusted Python code, and the tests it must pass.

    Args:
        source: the code.
        tests: without any, the code is run as a script.
        prefix: code before it, such as the signature in a prompt. If `source` does not define `entry_point`, it continues
            the prefix.
        entry_point: the function that the prefix begins; "" for none.
        stdin: input of a script without tests.
        lends: whether common names of the standard library, such as `List` and `deque`, need no import, as in the judges
            of LiveCodeBench and APPS.
    """

    source: str
    tests: Calls | Stdin | Asserts | Suite | None = None
    prefix: str = ""
    entry_point: str = ""
    stdin: str = ""
    lends: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use before it is stopped.

    Args:
        wall_s: seconds for one call, one script or one statement of the tests.
        total_s: seconds for the whole program with all its tests.
        memory_bytes: address space of each process, and memory of all of them together, in bytes.
        processes: simultaneous processes and threads.
        disk_bytes: total size of all files in bytes; files are in memory.
        files: maximum number of files.
        output_bytes: size of a script's output, or of a function's result as JSON. Longer expected answers raise it.
    """

    wall_s: Positive = 5.0
    total_s: Positive = 20.0
    memory_bytes: Count = 512 * 1024**2
    processes: Count = 32
    disk_bytes: Count = 32 * 1024**2
    files: Count = 4096
    output_bytes: Count = 1024**2

    def __post_init__(self) -> None:
        check_fields(self, "sandbox limits")


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test: its name, whether it passed, and why not.

    For a failed test, `shown` has the call, the expected and the actual answer in a few lines. It contains the expected
    answer, so show it only if the test is not secret.
    """

    __test__ = False  # for pytest, which would collect a class of this name

    name: str
    status: Status
    reason: str = ""
    shown: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a program. `level` is the sandbox that it ran in; `parsed` is False if it is not valid Python."""

    status: Status
    reason: str = ""
    tests: tuple[TestResult, ...] = ()
    stdout: str = ""
    stderr: str = ""
    parsed: bool = True
    wall_s: float = 0.0
    level: str = ""

    @property
    def passed_share(self) -> float:
        """Passed tests over all tests; 0 without tests."""
        return sum(test.passed for test in self.tests) / len(self.tests) if self.tests else 0.0


def outcome_of(values: dict[str, Any]) -> Outcome:
    """Return the outcome that `dataclasses.asdict` and JSON encoded. Raises TypeError or KeyError for anything else."""
    return Outcome(**{**values, "tests": tuple(TestResult(**test) for test in values["tests"])})
