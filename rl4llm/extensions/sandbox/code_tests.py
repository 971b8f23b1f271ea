"""Find the code in a model's reply, and parse the tests in a row of a dataset in any of the common layouts."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.core.thoughts import after_thinking
from rl4llm.extensions.sandbox import Asserts, Call, Calls, Program, Stdin, Suite

FENCE = "```"
Tests = Asserts | Calls | Stdin | Suite
_PYTHON = ("python", "python3", "py")
_ACCEPTED = (
    "assert statements or a function check(candidate) as text; a list of assert statements; "
    "{'inputs': [...], 'outputs': [...]} with 'fn_name' for calls, without it for programs that read and print; "
    "a list of {'input', 'output'} or of {'fn', 'args', 'expected'}; {'files': {name: text}, 'required': [ids]}"
)


def code_in(reply: str, entry_point: str = "") -> tuple[str, bool]:
    """Return the last code block in a reply, preferably Python, and whether it was in a closed block.

    Blocks that define `entry_point` come first, since a block after them is often an example of its use. A reply
    without any block is code as a whole. Reasoning up to ``</think>`` is skipped.
    """
    text = after_thinking(reply)
    pieces = text.split(FENCE)
    blocks = [piece.partition("\n") for piece in pieces[1::2]]
    closed = len(pieces) % 2 == 1
    if not blocks:
        return text, False
    named = [index for index, (language, _, _) in enumerate(blocks) if language.strip().lower() in _PYTHON]
    named = named or list(range(len(blocks)))
    defining = [index for index in named if entry_point and f"def {entry_point}(" in blocks[index][2]]
    chosen = (defining or named)[-1]
    return blocks[chosen][2], closed or chosen < len(blocks) - 1


def stored_tests(stored: Any, columns: Mapping[str, Any], column: str = "ground_truth") -> Tests:
    """Return the tests in a column of a row. Raises DataError for tests in an unknown layout.

    The columns `entry_point`, `prompt` (if it defines the entry point), `test_setup_code` and `test_imports` are used
    if they exist.
    """
    setup = "\n".join(
        [*(columns.get("test_imports") or ()), columns.get("test_setup_code") or "", _prefix(columns)]
    )
    try:
        return _tests(stored, columns.get("entry_point") or "", setup)
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"[:200]
        raise DataError(
            f"{column}={stored!r:.200} does not contain tests ({problem}). Accepted: {_ACCEPTED}."
        ) from error


def program_of(source: str, tests: Tests | None, columns: Mapping[str, Any]) -> Program:
    """Return a reply's code as a program, after the code in its row's column `prompt`, with tests or to be run alone."""
    return Program(source, tests, prefix=_prefix(columns), entry_point=columns.get("entry_point") or "")


def visible_tests(columns: Mapping[str, Any], prompt: str) -> Tests | None:
    """Return the tests that messages may show: the column `public_tests`, or the examples in the prompt; None without
    any.

    Raises DataError for a column without tests. The examples are taken from the column `prompt` if the row has it.
    """
    if columns.get("public_tests") is not None:
        return stored_tests(columns["public_tests"], columns, "public_tests")
    prompt = columns["prompt"] if isinstance(columns.get("prompt"), str) else prompt
    examples = examples_in(prompt, columns.get("entry_point") or "")
    return stored_tests(examples, columns) if examples else None


def examples_in(prompt: str, entry_point: str = "") -> list[str]:
    """Return assert statements for calls in a text that are followed by their values, as doctests or after an arrow.

        >>> examples_in("Examples: double(2) => 4\\n>>> double(3)\\n6", "double")
        ['assert double(3) == 6', 'assert double(2) == 4']

    Anything except calls of literals with a literal result is skipped.
    """
    found = _DOCTEST.findall(prompt)
    if entry_point:
        found += re.findall(rf"({re.escape(entry_point)}\(.*\)){_ARROW}(\S.*?){_END}", prompt, re.MULTILINE)
    return list(
        dict.fromkeys(f"assert {call} == {value}" for call, value in found if _is_example(call, value))
    )


_DOCTEST = re.compile(r"^[ \t]*>>>[ \t]*(.*\S)[ \t]*\n[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_ARROW = r"(?: is|\s*(?:[-=]*>|==?|➞|→|#?\s*(?:=>|returns|should return|should be equal to)))\s*"
_END = r"[ \t.]*(?:\"\"\"|\'\'\')?[ \t]*$"


def _is_example(call: str, value: str) -> bool:
    try:
        tree = ast.parse(call, mode="eval").body
        if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)):
            return False
        for part in [value, *map(ast.unparse, [*tree.args, *(keyword.value for keyword in tree.keywords)])]:
            ast.literal_eval(part)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _prefix(columns: Mapping[str, Any]) -> str:
    """Return the code before the reply, if the column `prompt` defines the entry point."""
    prompt, entry_point = columns.get("prompt"), columns.get("entry_point") or ""
    return prompt if isinstance(prompt, str) and entry_point and f"def {entry_point}" in prompt else ""


def _tests(ground_truth: Any, entry_point: str, setup: str) -> Tests:
    if isinstance(ground_truth, str):
        if ground_truth.lstrip()[:1] not in ("{", "["):
            return _filled(Asserts((ground_truth,), entry_point, setup), ground_truth.strip())
        ground_truth = json.loads(ground_truth)
    if isinstance(ground_truth, Mapping):
        return _from_mapping(ground_truth)
    if not isinstance(ground_truth, Sequence) or not ground_truth:
        raise ValueError("no tests")
    if all(isinstance(test, str) for test in ground_truth):
        return Asserts(tuple(ground_truth), entry_point, setup)
    if "fn" in ground_truth[0]:
        cases = (
            Call(case["fn"], tuple(case["args"]), case["expected"], case.get("kwargs", {}))
            for case in ground_truth
        )
        return Calls(tuple(cases))
    return Stdin(tuple((_text(case["input"]), _text(case["output"])) for case in ground_truth))


def _from_mapping(tests: Mapping[str, Any]) -> Calls | Stdin | Suite:
    if "required" in tests:
        files = {str(name): str(text) for name, text in tests["files"].items()}
        required = tuple(map(str, tests["required"]))
        unknown = [name for name in required if name.partition("::")[0] not in files or "::" not in name]
        if unknown:
            raise ValueError(f"required: {unknown} are not in {sorted(files)}")
        return _filled(Suite(files, required), required)
    pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
    if tests.get("fn_name"):
        return _filled(
            Calls(tuple(Call(tests["fn_name"], tuple(given), expected) for given, expected in pairs)), pairs
        )
    return _filled(Stdin(tuple((_text(given), _text(expected)) for given, expected in pairs)), pairs)


def _text(value: Any) -> str:
    """Return what a program reads or prints as one text; some datasets store a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _filled(tests: Any, content: Any) -> Any:
    if not content:
        raise ValueError("no tests")
    return tests
