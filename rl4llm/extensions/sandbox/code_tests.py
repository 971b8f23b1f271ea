"""Find the code in a model's reply and the tests in a row of a dataset, and run the one against the others."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.core.message import after_thinking
from rl4llm.extensions.sandbox import Asserts, Calls, Limits, Outcome, Program, Sandbox, Stdin, Suite
from rl4llm.extensions.sandbox.layouts import Tests, function_name, read_tests
from rl4llm.extensions.sandbox.units import expected_names

MAX_CHARS = 100_000
UNREADABLE = LookupError, TypeError, ValueError, AttributeError, SyntaxError, RecursionError, MemoryError
_MARGIN = " \t>"
_ITEM = _MARGIN + "-*+.)0123456789"
_PYTHON = re.compile(r"\W*py(thon)?[\d.]*\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CodeRun:
    """The result of a reply: an outcome, or a note why nothing was run. `fenced`: its code was in a closed block."""

    outcome: Outcome | None
    note: str | None = None
    fenced: bool = False
    code: str = ""


def run_reply(
    sandbox: Sandbox, limits: Limits, reply: str, tests: Tests | None, columns: Mapping[str, Any]
) -> CodeRun:
    """Run the program in a reply, whose row has `columns`, against tests, or alone if there are none. It blocks.

    Code of more than MAX_CHARS characters is not run.
    """
    if len(reply) > 4 * MAX_CHARS:
        return CodeRun(None, f"too_long: the reply has {len(reply)} characters")
    code, fenced = code_in(reply, columns.get("entry_point") or "")
    if not code.strip():
        return CodeRun(None, "no_code", fenced)
    if len(code) > MAX_CHARS:
        return CodeRun(None, f"too_long: the code has {len(code)} characters", fenced)
    outcome = sandbox.run(program_of(code, tests, columns), limits)
    note = f"model_error: {outcome.reason}" if outcome.status == "model_error" else None
    return CodeRun(outcome, note, fenced, code)


def code_in(reply: str, entry_point: str = "") -> tuple[str, bool]:
    """Return the last code block in a reply, preferably Python, and whether it was in a closed block.

    Blocks that define `entry_point` come first, since a block after them is often an example of its use. A reply
    without any block is code as a whole. Thoughts are skipped.
    """
    text = after_thinking(reply)
    blocks = list(_blocks(text))
    if not blocks:
        return text, False
    named = [block for block in blocks if _PYTHON.match(block[0])] or blocks
    defining = [block for block in named if entry_point and f"def {entry_point}(" in block[1]]
    return (defining or named)[-1][1:]


def _blocks(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield the language, the code and whether it is closed for each fenced block, as CommonMark reads them.

    Fences of backticks may also begin and end a block behind other text.
    """
    lines = iter(text.splitlines(keepends=True))
    for line in lines:
        mark = "~~~" if line.lstrip(_MARGIN).startswith("~~~") else "```"
        lead, fence, info = line.partition(mark)
        language = info.lstrip(mark[0])
        behind = lead.strip(_ITEM)
        if not fence or "`" in language or (behind and not f"x{language.strip()}".isalnum()):
            continue  # code in a line, or a text of a program
        fence += info[: len(info) - len(language)]
        code: list[str] = []
        closed = False
        for inner in lines:
            rest = inner.rstrip().rstrip(mark[0])
            alone = not rest.strip(_MARGIN)
            closed = inner.rstrip().endswith(fence) and (alone or mark == "```")
            code.append(inner if not closed else "" if alone else rest)
            if closed:
                break
        yield language, _unindented(code, 0 if behind else len(lead)), closed


def _unindented(lines: Sequence[str], most: int) -> str:
    """Return the lines of a block without the margin that its fence has too."""
    margins = [len(line) - len(line.lstrip(_MARGIN)) for line in lines if line.strip(_MARGIN + "\r\n")]
    width = min([most, *margins])
    return "".join(re.sub(rf"^[{_MARGIN}]{{0,{width}}}", "", line) for line in lines)


def unknown_names(tests: Tests, code: str, columns: Mapping[str, Any], prompt: str) -> list[str]:
    """Return the names that tests take from the program, but that it lacks and could not know from its prompt.

    A program without any of their names is at fault itself.
    """
    if not isinstance(tests, Asserts | Suite):
        return []
    entry_point = function_name(columns.get("entry_point")).rpartition(".")[2]
    names = expected_names(tests) | {entry_point} - {""}
    text = f"{_prefix(columns)}\n{code}"
    lacked = {name for name in names if not re.search(_DEFINES.format(re.escape(name)), text)}
    if lacked == names or entry_point in lacked:
        return []
    task = f"{prompt} {columns.get('prompt')}"
    return sorted(name for name in lacked if not re.search(rf"\b{name}\b", task))


_DEFINES = (
    r"(?m)^[ \t]*(async +)?(def|class) +{0}\b|^(from|import)\b[^\n]*\b{0}\b"
    r"|^[\w, ]{{0,200}}\b{0}\b[\w, ]{{0,200}}[:=]"
)


def stored_tests(stored: Any, columns: Mapping[str, Any], column: str = "ground_truth") -> Tests:
    """Return the tests in a column of a row. Raises DataError for tests in an unknown layout.

    The columns `entry_point`, `prompt` (if it is code), `test_setup_code`, `test_imports` and `metadata` are used if
    they exist; see `rl4llm.extensions.sandbox.layouts`.
    """
    setup = "\n".join([*(columns.get("test_imports") or ()), columns.get("test_setup_code") or ""])
    try:
        return read_tests(stored, columns, setup, _prefix(columns))
    except UNREADABLE as error:
        problem = f"{type(error).__name__}: {error}"[:400]
        raise DataError(
            f"{column}={stored!r:.200} has no tests: {problem}. docs/programs.md lists the layouts."
        ) from error


def program_of(source: str, tests: Tests | None, columns: Mapping[str, Any]) -> Program:
    """Return a reply's code as a program, after the code in its row's column `prompt`, with tests or to be run alone."""
    lends = isinstance(tests, Stdin) or (isinstance(tests, Calls) and tests.judge != "exact")
    entry_point = function_name(columns.get("entry_point"))
    return Program(source, tests, prefix=_prefix(columns), entry_point=entry_point, lends=lends)


def visible_tests(columns: Mapping[str, Any], prompt: str) -> Tests | None:
    """Return the tests that messages may show: the column `public_tests`, or `public_test_cases` as in LiveCodeBench, or
    the examples in the prompt; None without any.

    Raises DataError for a column without tests. The examples are taken from the column `prompt` if the row has it.
    """
    for column in ("public_tests", "public_test_cases"):
        if columns.get(column) is not None:
            return stored_tests(columns[column], columns, column)
    prompt = columns["prompt"] if isinstance(columns.get("prompt"), str) else prompt
    examples = examples_in(prompt, columns.get("entry_point") or "")
    return stored_tests(examples, columns) if examples else None


def examples_in(prompt: str, entry_point: str = "") -> list[str]:
    """Return assert statements for calls in a text that are followed by their values, as doctests or after an arrow.

        >>> examples_in("Examples: double(2) => 4\\n>>> double(3)\\n6", "double")
        ['assert double(3) == 6', 'assert double(2) == 4']

    Anything except calls of literals with a literal result is skipped.
    """
    pairs = _DOCTEST.findall(prompt)
    if entry_point:
        pairs += re.findall(rf"({re.escape(entry_point)}\(.*\)){_ARROW}(\S.*?){_END}", prompt, re.MULTILINE)
    asserts = (f"assert {call} == {value}" for call, value in pairs if _is_example(call, value))
    return list(dict.fromkeys(asserts))


_DOCTEST = re.compile(r"^[ \t]*>>>[ \t]*(.*\S)[ \t]*\n[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_ARROW = r"(?: is|\s*(?:[-=]*>|==?|➞|→|#?\s*(?:=>|returns|should return|should be equal to)))\s*"
_END = r"[ \t.]*(?:\"\"\"|\'\'\')?[ \t]*$"


def _is_example(call: str, value: str) -> bool:
    with contextlib.suppress(*UNREADABLE):
        tree = ast.parse(call, mode="eval").body
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            ast.literal_eval(value)
            for part in (*tree.args, *(keyword.value for keyword in tree.keywords)):
                ast.literal_eval(part)
            return True
    return False


def _prefix(columns: Mapping[str, Any]) -> str:
    """Return the code before the reply: a column `prompt` that defines the entry point, or consists of definitions."""
    prompt, entry_point = columns.get("prompt"), function_name(columns.get("entry_point"))
    if not isinstance(prompt, str) or not entry_point:
        return ""
    return prompt if f"def {entry_point}" in prompt or _defines_only(prompt) else ""


def _defines_only(prompt: str) -> bool:
    """Return whether a text is nothing but imports, definitions and constants, which LeetCode's programs begin with."""
    nodes: list[ast.stmt] = []
    with contextlib.suppress(*UNREADABLE):
        nodes = ast.parse(prompt).body
    defining = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign)
    return bool(nodes) and all(isinstance(node, defining) for node in nodes)
