"""What is run in a sandbox, how much of the machine it may use, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rl4llm.core.errors import ConfigError

Status = Literal["ok", "wrong", "model_error", "infra_error"]
"""ok: all tests passed, or the script ran. wrong: a test failed on what the program answered. model_error: the program does
not parse, crashed, hung or took too much. infra_error: the sandbox or the tests did not work, whatever the program was."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function of the program, and the value that it must return, its type included.

    `fn` is a name, or ``Class.method``, for which the class is made without arguments.
    """

    fn: str
    args: tuple[Any, ...]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Calls:
    """Function-call tests. Values are Python literals; floats may differ by `float_tolerance`, relative or absolute."""

    cases: tuple[Call, ...]
    float_tolerance: float = 1e-9


@dataclass(frozen=True, slots=True)
class Stdin:
    """Tests of a whole program: for each pair of texts, what it reads and what it must print.

    Blanks at the ends of lines and empty lines at the end do not count.
    """

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Asserts:
    """Tests that are code: assert statements, or a function ``check(candidate)`` as HumanEval has it.

    Each statement with an assert in it is a test. `setup` runs before them; names that neither it nor the tests define are
    the program's functions. Where there is no such name, the one builtin that they call is meant.
    The tests and the program live in two processes, between which only values of Python's literals pass: tests of its
    classes or of changes to an argument fail here, whatever the program is. An iterator passes with all that it yields.
    """

    tests: tuple[str, ...]
    entry_point: str = ""
    setup: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """Test files by name, and the ids that must pass: ``test_x.py::test_a`` or ``test_x.py::TestB::test_c``.

    The files get the program's functions by ``from solution import f``. Functions, methods of ``unittest.TestCase``
    and of plain classes are known. A skipped, missing or uncollected test failed.
    """

    files: Mapping[str, str]
    required: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Python code that nobody vouches for, and the tests it must pass.

    Args:
        source: the code.
        tests: without any, the code is run as a script.
        prefix: code before it, such as the signature that a prompt gave. When `source` does not define `entry_point`, it
            continues the prefix.
        entry_point: the function that the prefix begins; "" for none.
        stdin: what a script without tests reads.
    """

    source: str
    tests: Calls | Stdin | Asserts | Suite | None = None
    prefix: str = ""
    entry_point: str = ""
    stdin: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use before it is ended.

    Args:
        wall_s: seconds of one call, one script or one statement of the tests.
        total_s: seconds of the whole program with all its tests.
        memory_bytes: address space of each process; all of them together may hold as much.
        processes: processes and threads at a time.
        disk_bytes: of all files; they lie in memory.
        files: how many files there may be.
        output_bytes: of what it prints, per script; of what a function returns, as JSON. Longer expected answers raise it.
    """

    wall_s: float = 5.0
    total_s: float = 20.0
    memory_bytes: int = 512 * 1024**2
    processes: int = 32
    disk_bytes: int = 32 * 1024**2
    files: int = 4096
    output_bytes: int = 1024**2

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
                raise ConfigError(f"sandbox limit {name}={value!r} is not accepted: a number above 0.")


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test: its name, whether it passed, and why not.

    Of one that failed, `shown` is what was asked, expected and answered, in a few lines. It holds the expected answer, so it
    is only for whom the test is no secret.
    """

    __test__ = False  # for pytest, which takes the name for a class of tests

    name: str
    status: Status
    reason: str = ""
    shown: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a program. `level` names the sandbox that it ran in; `parsed` is False where it is not even Python."""

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
        """Passed tests over all tests; 0 where there are none."""
        return sum(test.passed for test in self.tests) / len(self.tests) if self.tests else 0.0


def outcome_of(values: dict[str, Any]) -> Outcome:
    """An outcome from what `dataclasses.asdict` and JSON made of it; TypeError or KeyError for what is none."""
    return Outcome(**{**values, "tests": tuple(TestResult(**test) for test in values["tests"])})
