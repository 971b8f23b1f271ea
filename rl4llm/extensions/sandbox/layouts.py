"""Read the tests of a row in the layouts of published sets: each is read by what the row says that it is.

A layout that this module does not know, and a key that has no meaning in a layout, raises ValueError with what is
accepted. Nothing is read as something else.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rl4llm.extensions.sandbox import Asserts, Call, Calls, Stdin, Suite
from rl4llm.extensions.sandbox.units import bound_names, statements

Tests = Asserts | Calls | Stdin | Suite
ACCEPTED = (
    "assert statements, a function check(candidate) or functions test_... as text; a list of assert statements; "
    "{'inputs': [...], 'outputs': [...]} with 'fn_name' for calls, without it for programs that read and print; "
    "a list of {'input', 'output'} with 'testtype' (stdin, functional) or 'type' (stdin_stdout, function_call); "
    "a list of {'fn', 'args', 'expected'}; {'files': {name: text}, 'required': [ids]}"
)
PICKLED = (
    "they are a pickle, which is never loaded, because it may run any code. If you trust its source, store JSON instead: "
    "json.loads(pickle.loads(zlib.decompress(base64.b64decode(text))))"
)
TEST_FILE = "test_solution.py"
_KINDS = {
    "stdin": "stdin",
    "stdin_stdout": "stdin",
    "functional": "call",
    "function_call": "call",
    None: None,
}
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
            raise ValueError(
                f"the column {name!r} says that outputs are not compared, which this reward does"
            )
    if isinstance(content, str):
        return _from_code((content,), function_name(columns.get("entry_point")), setup, prefix)
    if isinstance(content, Mapping):
        return _from_mapping(content, columns)
    if not isinstance(content, Sequence) or not content:
        raise ValueError("no tests")
    if all(isinstance(test, str) for test in content):
        return _from_code(tuple(content), function_name(columns.get("entry_point")), setup, prefix)
    return _from_cases(content, columns)


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
    if not nodes:
        raise ValueError("no tests")
    ids = [test for node in nodes for test in _test_ids(node)]
    if ids:
        text = "\n".join([*filter(str.strip, [setup]), *texts])
        return Suite({TEST_FILE: text}, tuple(f"{TEST_FILE}::{test}" for test in ids))
    entry_point = entry_point or _checked_function(nodes)
    if not entry_point and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in nodes):
        raise ValueError("check(candidate) is never called, and the row has no entry_point")
    tests = Asserts(texts, entry_point, "\n".join([setup, prefix]))
    if not any(source for _, _, source in statements(tests)):
        raise ValueError("there is no assert in them")
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
        name = used[0].strip(" .$")
        raise ValueError(
            f"they use {name!r}, which does not reach the program, since it runs in another process"
        )
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
        return _suite(_known(tests, ("files", "required")))
    if "test_cases" in tests:
        cases = _known(tests, ("language", "test_cases"))
        if str(cases.get("language", "python")).lower() not in ("python", "python3"):
            raise ValueError(f"language={cases['language']!r} is not accepted. Accepted: python")
        return _from_cases(cases["test_cases"], columns)
    if "inputs" not in tests:
        return _from_cases([tests], columns)
    given = _known(tests, ("inputs", "outputs", "fn_name", "type"))
    pairs = zip(given.pop("inputs"), given.pop("outputs"), strict=True)
    return _from_cases([{"input": one, "output": other, **given} for one, other in pairs], columns)


def _suite(tests: Mapping[str, Any]) -> Suite:
    files = {str(name): str(text) for name, text in tests["files"].items()}
    for text in files.values():
        _parsed(text)
    required = tuple(map(str, tests["required"]))
    unknown = [name for name in required if name.partition("::")[0] not in files or "::" not in name]
    if unknown or not required:
        raise ValueError(f"required: {unknown} are not in {sorted(files)}")
    return Suite(files, required)


def _from_cases(cases: Sequence[Any], columns: Mapping[str, Any]) -> Calls | Stdin:
    """Read a list of tests, which all say the same of what they are."""
    if not cases or not all(isinstance(case, Mapping) for case in cases):
        raise ValueError("no list of tests")
    if "fn" in cases[0]:
        own = [_known(case, ("fn", "args", "kwargs", "expected")) for case in cases]
        return Calls(
            tuple(
                Call(case["fn"], tuple(case["args"]), case["expected"], case.get("kwargs", {}))
                for case in own
            )
        )
    known = [_known(case, ("input", "output", "testtype", "type", "fn_name", "metadata")) for case in cases]
    kinds = {case.get("testtype", case.get("type")) for case in known}
    names = {case.get("fn_name") or _function_in(case) or "" for case in known}
    if len(kinds) > 1 or len(names) > 1:
        raise ValueError(
            f"tests of one row differ: kinds {sorted(map(str, kinds))}, functions {sorted(names)}"
        )
    kind, name = kinds.pop(), names.pop()
    if kind not in _KINDS:
        raise ValueError(f"type {kind!r} of a test is unknown. Accepted: {', '.join(filter(None, _KINDS))}")
    if _KINDS[kind] != "stdin":
        name = name or _function_in(columns)
    if (_KINDS[kind] or bool(name)) == ("stdin" if name else "call"):
        raise ValueError(
            f"type {kind!r} and the function {name!r} do not fit: 'fn_name', or 'func_name' in metadata"
        )
    pairs = [(case["input"], case["output"]) for case in known]
    return _calls(name, pairs) if name else Stdin(tuple((_text(one), _text(other)) for one, other in pairs))


def _known(tests: Mapping[str, Any], accepted: Sequence[str]) -> dict[str, Any]:
    """Return the keys that have a value, without the nulls of tables. Raises ValueError for one without a meaning."""
    given = {str(key): value for key, value in tests.items() if value is not None}
    unknown = sorted(given.keys() - set(accepted))
    if unknown:
        raise ValueError(
            f"the key {unknown[0]!r} of a test is unknown. Accepted beside it: {', '.join(accepted)}"
        )
    return given


def _function_in(row: Mapping[str, Any]) -> str:
    """Return the function that the metadata of LiveCodeBench names; "" for none."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:  # a column of another set
            return ""
    return str(metadata.get("func_name") or "") if isinstance(metadata, Mapping) else ""


def _calls(name: str, pairs: Sequence[tuple[Any, Any]]) -> Calls:
    """Make calls of inputs and outputs: lists of arguments, or a text with one argument per line, as JSON."""
    cases = [_call(function_name(name), given, expected) for given, expected in pairs]
    wrapped = all(
        isinstance(given, Sequence)
        and not isinstance(given, str)
        and isinstance(expected, list)
        and len(expected) == 1
        for given, expected in pairs
    )
    return Calls(tuple(cases), judge="wrapped" if wrapped else "json")


def _call(name: str, given: Any, expected: Any) -> Call:
    if isinstance(given, str):
        lines = given.rstrip().split("\n") if given.strip() else ()
        return Call(name, tuple(map(json.loads, lines)), json.loads(expected))
    if not isinstance(given, Sequence):
        raise TypeError(f"the input {given!r:.60} of a call is not a list of arguments")
    arguments = list(given)
    if arguments and isinstance(arguments[0], Mapping):
        arguments[0] = _numbered(arguments[0])
    return Call(name, tuple(arguments), expected)


def _numbered(argument: Mapping[str, Any]) -> dict[Any, Any]:
    """Return a dictionary with the whole numbers as keys that JSON has made texts, as the judge of APPS does."""
    try:
        return {int(key): value for key, value in argument.items()}
    except ValueError:
        return dict(argument)


def _text(value: Any) -> str:
    """Return what a program reads or prints as one text; some sets store a list of lines."""
    if isinstance(value, Mapping):
        raise TypeError(f"{value!r:.60} is neither a text nor a list of lines")
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
