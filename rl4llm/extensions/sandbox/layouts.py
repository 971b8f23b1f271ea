"""Read the tests of a row in the layouts of published sets: each is read by what the row says that it is.

An unknown layout, and a key without a meaning in a layout, raise ValueError. Nothing is read as something else.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rl4llm.extensions.sandbox import Asserts, Call, Calls, Stdin, Suite
from rl4llm.extensions.sandbox.units import bound_names, statements

Tests = Asserts | Calls | Stdin | Suite
PICKLED = "they are a pickle, which may run any code and is never loaded; store the JSON in it"
TEST_FILE = "test_solution.py"
_READING = ("stdin", "stdin_stdout")
_CALLING = ("functional", "function_call")
_JUDGED = re.compile(r"(^|_)(checker|interact(or|ive|ion_format)|special_judge|(input|output)_mode)(_|$)")
_SHARED = re.compile(  # what tests share with a program only in one process; $ is before names of modules
    r"(?m)\$((unittest\.)?mock\.(patch(?!\('sys\.std(out|err)', )|mock_open)|freezegun|time_machine|builtins\.(open|input)"
    r"|io\.open|pathlib|tempfile|shutil|sqlite3|subprocess|multiprocessing|socket|http\.server|inspect|sys\.(stdin|argv)"
    r"|asyncio\.iscoroutinefunction|typing\.get_type_hints|decimal\.\w+context|pytest\.(warns|MonkeyPatch)|logging\.getLogger"
    r"|os\.(environ|getenv|putenv|chdir|listdir|scandir|walk|stat|mkdir|makedirs|remove|unlink|rmdir|rename|system|popen|fork"
    r"|path\.(exists|is|getsize))|pytest\.fixture\([^\n]*autouse=|warnings\.catch_warnings\([^\n]*record=)"
    r"|\.(assert(No)?(Logs|Warns)|__(doc|annotations|code|defaults|wrapped|dict|cause|context)__)|\bissubclass\(|\b(set|del)attr\(\$"
    r"|^ *\$(?!sys\.std(out|err)\b)[^\n]*? [-+*/|&]?= "
)


def read_tests(stored: Any, columns: Mapping[str, Any], setup: str, prefix: str) -> Tests:
    """Return the tests that a row stores, with the code before them and the code that the program may continue.

    Raises ValueError, KeyError or TypeError for an unknown layout.
    """
    content = _decoded(stored)
    for name, value in columns.items():
        if value and _JUDGED.search(name) and value not in ("stdio", "stdin", "stdout"):
            raise ValueError(f"the column {name!r} says that outputs are not compared")
    if isinstance(content, Mapping):
        return _from_mapping(content, columns)
    texts = (content,) if isinstance(content, str) else tuple(content)
    if all(isinstance(test, str) for test in texts):
        return _from_code(texts, function_name(columns.get("entry_point")), setup, prefix)
    return _from_cases(texts, columns)


def function_name(entry_point: Any) -> str:
    """Return the name of a row's function: ``f``, or ``Solution.f`` for ``Solution().f``."""
    return str(entry_point or "").replace("()", "")


def _decoded(stored: Any) -> Any:
    """Return stored tests without their JSON and compression. Raises ValueError for a pickle."""
    if not isinstance(stored, str):
        return stored
    text = stored.strip()
    if text[:1] in ("{", "["):
        return json.loads(text)
    try:
        unpacked = zlib.decompress(base64.b64decode(text, validate=True))
    except (ValueError, zlib.error):
        return stored
    if unpacked[:1] == b"\x80":
        raise ValueError(PICKLED)
    return json.loads(unpacked)


@lru_cache(64)  # the samples of a prompt have the same tests, which may be long
def _from_code(texts: tuple[str, ...], entry_point: str, setup: str, prefix: str) -> Asserts | Suite:
    nodes = [node for text in texts for node in _parsed(text).body]
    ids = [test for node in nodes for test in _test_ids(node)]
    if ids:
        text = "\n".join([*filter(str.strip, [setup]), *texts])
        return Suite({TEST_FILE: text}, tuple(f"{TEST_FILE}::{test}" for test in ids))
    entry_point = entry_point or _checked_function(nodes)
    if not entry_point and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in nodes):
        raise ValueError("check(candidate) is never called, and the row has no entry_point")
    tests = Asserts(texts, entry_point, "\n".join([setup, prefix]))
    if not any(source for _, _, source in statements(tests)):
        raise ValueError("no tests, or no assert in them")
    return tests


class _Full(ast.NodeTransformer):
    """Writes the names of modules in full, and empties texts, so that `_SHARED` finds what tests use."""

    def __init__(self, bound: set[str]):
        self.modules = {name: f"builtins.{name}" for name in ("open", "input") if name not in bound}

    def visit_Import(self, node: ast.Import) -> ast.Pass:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            self.modules[alias.asname or name] = name
        return ast.Pass()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.Pass:
        self.modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return ast.Pass()

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(f"${self.modules[node.id]}" if node.id in self.modules else node.id)

    def visit_List(self, node: Any) -> ast.AST:
        node.elts = [item for item in node.elts if not isinstance(item, ast.Constant | ast.UnaryOp)]
        return self.generic_visit(node)

    visit_Tuple = visit_Set = visit_List

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        emptied = isinstance(node.value, str) and not node.value.startswith("sys.std")
        return ast.Constant("") if emptied else node


def _parsed(text: str) -> ast.Module:
    """Parse tests. Raises ValueError for what works only if the program runs in their process."""
    tree = ast.parse(text)
    if used := _SHARED.search(ast.unparse(_Full(bound_names(list(ast.walk(tree)))).visit(tree))):
        raise ValueError(f"they use {used[0].strip(' .$')!r}, but the program runs in another process")
    return ast.parse(text)


def _checked_function(nodes: Sequence[ast.stmt]) -> str:
    """Return the function that the tests pass to `check` themselves, as in ``check(add)``; "" without such a call."""
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id="check"), args=[checked, *_])):
                return function_name(ast.unparse(checked))
    return ""


def _test_ids(node: ast.stmt) -> list[str]:
    """Return the tests in a statement as pytest collects them: functions ``test_...`` and those of classes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
        return [node.name]
    if not isinstance(node, ast.ClassDef):
        return []
    cases = any(ast.unparse(base).endswith("TestCase") for base in node.bases)
    if not (cases or node.name.startswith("Test")):
        return []
    return [f"{node.name}::{test}" for part in node.body for test in _test_ids(part) if "::" not in test]


def _from_mapping(tests: Mapping[str, Any], columns: Mapping[str, Any]) -> Calls | Stdin | Suite:
    if "required" in tests:
        return _suite(_fields(tests, ("files", "required")))
    if "test_cases" in tests:
        fields = _fields(tests, ("language", "test_cases"))
        if str(fields.get("language", "python")).lower() not in ("python", "python3"):
            raise ValueError(f"language={fields['language']!r} is not accepted")
        return _from_cases(fields["test_cases"], columns)
    if "inputs" not in tests:
        return _from_cases([tests], columns)
    fields = _fields(tests, ("inputs", "outputs", "fn_name", "type"))
    pairs = zip(fields.pop("inputs"), fields.pop("outputs"), strict=True)
    return _from_cases([{"input": text, "output": answer, **fields} for text, answer in pairs], columns)


def _suite(tests: Mapping[str, Any]) -> Suite:
    files = {str(name): str(text) for name, text in tests["files"].items()}
    for text in files.values():
        _parsed(text)
    required = tuple(map(str, tests["required"]))
    if not required or not all("::" in name and name.partition("::")[0] in files for name in required):
        raise ValueError(f"required={tests['required']!r} are not tests in {sorted(files)}")
    return Suite(files, required)


def _from_cases(cases: Sequence[Any], columns: Mapping[str, Any]) -> Calls | Stdin:
    """Read a list of tests, which all say the same of what they are."""
    if "fn" in cases[0]:
        calls = [_fields(case, ("fn", "args", "kwargs", "expected")) for case in cases]
        return Calls(tuple(Call(**{"kwargs": {}, **call, "args": tuple(call["args"])}) for call in calls))
    rows = [_fields(case, ("input", "output", "testtype", "type", "fn_name", "metadata")) for case in cases]
    kinds = {(row.get("testtype", row.get("type")), row.get("fn_name") or _function_in(row)) for row in rows}
    if len(kinds) > 1:
        raise ValueError(f"the tests of one row differ: {kinds}")
    kind, name = kinds.pop()
    if kind not in _READING:
        name = name or _function_in(columns)
    # what a test says that it is, and whether it names a function, must agree
    if kind not in (None, *(_CALLING if name else _READING)):
        raise ValueError(f"the type {kind!r} of a test is unknown, or does not fit to its function {name!r}")
    pairs = [(row["input"], row["output"]) for row in rows]
    return _calls(name, pairs) if name else Stdin(tuple((_text(text), _text(out)) for text, out in pairs))


def _fields(test: Mapping[str, Any], accepted: Sequence[str]) -> dict[str, Any]:
    """Return the keys that have a value, without the nulls of tables. Raises ValueError for one without a meaning."""
    fields = {str(key): value for key, value in test.items() if value is not None}
    if unknown := fields.keys() - set(accepted):
        raise ValueError(f"the key {min(unknown)!r} of a test is unknown")
    return fields


def _function_in(row: Mapping[str, Any]) -> str:
    """Return the function that the metadata of LiveCodeBench names; "" for none."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        with contextlib.suppress(ValueError):  # a column of another set
            metadata = json.loads(metadata)
    return str(metadata.get("func_name") or "") if isinstance(metadata, Mapping) else ""


def _calls(name: str, pairs: Sequence[tuple[Any, Any]]) -> Calls:
    """Make calls of inputs and outputs: lists of arguments, or a text with one argument per line, as JSON."""
    cases = [_call(function_name(name), arguments, expected) for arguments, expected in pairs]
    is_list = [not isinstance(arguments, str) and isinstance(answer, list) for arguments, answer in pairs]
    wrapped = all(is_list) and all(len(answer) == 1 for _, answer in pairs)
    return Calls(tuple(cases), judge="wrapped" if wrapped else "json")


def _call(name: str, arguments: Any, expected: Any) -> Call:
    if isinstance(arguments, str):
        lines = arguments.rstrip().split("\n") if arguments.strip() else ()
        return Call(name, tuple(map(json.loads, lines)), json.loads(expected))
    if not isinstance(arguments, Sequence):
        raise TypeError(f"the input {arguments!r:.60} of a call is not a list of arguments")
    values = list(arguments)
    if values and isinstance(values[0], Mapping):
        with contextlib.suppress(ValueError):  # JSON made texts of whole numbers, as the judge of APPS knows
            values[0] = {int(key): value for key, value in values[0].items()}
    return Call(name, tuple(values), expected)


def _text(value: Any) -> str:
    """Return what a program reads or prints as one text; some sets store a list of lines."""
    if isinstance(value, Mapping):
        raise TypeError(f"{value!r:.60} is neither a text nor lines")
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
