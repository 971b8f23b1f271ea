"""What the process of tests that are code runs, statement by statement or function by function."""

from __future__ import annotations

import ast
import builtins
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from rl4llm.extensions.sandbox.program import Asserts, Suite

LIBRARY = {
    "math", "cmath", "re", "collections", "itertools", "functools", "string", "random", "copy", "heapq", "bisect",
    "datetime", "operator", "sys", "os", "json", "statistics", "decimal", "fractions", "numbers", "typing",
}  # fmt: skip
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_RAISES = ("raises", "assertRaises", "assertRaisesRegex")
_RETURNS = (ast.Return, ast.Yield, ast.YieldFrom, ast.Nonlocal)


def job_of(tests: Asserts | Suite, entry_point: str) -> dict[str, Any]:
    """Return the job of a process of tests. Raises SyntaxError or ValueError for tests that cannot run.

    Each of its `units` has a name, whether it is a test, its file, the function in it (none for the whole file), and its
    source.
    """
    if isinstance(tests, Asserts):
        return _job_of_asserts(tests, entry_point)
    units = [(test, True, *test.split("::", 1), "") for test in tests.required]
    return _job(dict(tests.files), units)


@lru_cache(8)  # the programs of a prompt have the same tests, which may be long
def _job_of_asserts(tests: Asserts, entry_point: str) -> dict[str, Any]:
    entry_point = tests.entry_point or entry_point or _builtin_meant(tests)
    checks = [node for text in tests.tests for node in _check_functions(ast.parse(text))]
    names = [entry_point, *(node.args.args[0].arg for node in checks)] if entry_point else []
    pieces = list(statements(tests))
    files = {f"tests {i}": ast.unparse(part) for i, (_, part, _) in enumerate(pieces)}
    units = [(name, bool(source), f"tests {i}", "", source) for i, (name, _, source) in enumerate(pieces)]
    return {**_job(files, units), "setup": tests.setup, "names": names, "entry_point": entry_point}


def _job(files: dict[str, str], units: list[Any]) -> dict[str, Any]:
    leaves = [(file, leaf) for file, text in files.items() for leaf in ast.walk(ast.parse(text))]
    calls = [(file, leaf.lineno, leaf.value) for file, leaf in leaves if isinstance(leaf, ast.Expr)]
    nodes = [leaf for _, leaf in leaves]
    return {
        "files": files, "units": units, "setup": "", "names": [], "entry_point": "", "caught": sorted(set(_caught(nodes))),
        "dropped": [(file, line) for file, line, value in calls if isinstance(value, ast.Call)],
        "libraries": sorted(libraries(nodes)),
    }  # fmt: skip


def statements(tests: Asserts) -> Iterator[tuple[str, ast.stmt, str]]:
    """Yield the name, the node and the source of each statement, in order; a step before a test has no source.

    Those of the function `check` are statements of the tests, so that each of its asserts counts.
    """
    trees = [ast.parse(text) for text in tests.tests]
    asserting = _asserting(_leaves([tests.setup, *tests.tests]))
    number = 0
    for text, tree in zip(tests.tests, trees, strict=True):
        lines = text.splitlines()
        for part in _parts(tree):
            inner = [] if isinstance(part, _DEFINITIONS) else list(ast.walk(part))
            # HumanEval contains `assert True`, which tests nothing
            is_test = any(isinstance(leaf, ast.Name) for leaf in inner) and _fails(inner, asserting)
            number += is_test
            source = "\n".join(lines[part.lineno - 1 : part.end_lineno]).strip() or "assert"
            name = f"assert {number}" if is_test else f"line {part.lineno}"
            yield name, part, source if is_test else ""


def bound_names(leaves: Sequence[ast.AST]) -> set[str]:
    """Return the names that code binds, "*" for those of a whole module that is not the program."""
    bound: set[str] = set()
    for node in leaves:
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.ImportFrom(module="solution", names=[ast.alias(name="*")]):
                continue
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound |= {alias.asname or alias.name.partition(".")[0] for alias in names}
    return bound


def expected_names(tests: Asserts | Suite) -> set[str]:
    """Return the names that tests take from the program: those that they import from it, and bind nowhere."""
    leaves = _leaves([tests.setup, *tests.tests] if isinstance(tests, Asserts) else tests.files.values())
    imports = [node for node in leaves if isinstance(node, ast.ImportFrom) and node.module == "solution"]
    named = {alias.name for node in imports for alias in node.names} - {"*"}
    bound = {*bound_names(leaves), *dir(builtins), "__name__", "__file__"}
    used = set() if "*" in bound else {node.id for node in leaves if isinstance(node, ast.Name)}
    return named | (used - bound - libraries(leaves))


def libraries(leaves: Sequence[ast.AST]) -> set[str]:
    """Return the modules that tests use without importing them."""
    bases = [leaf.value for leaf in leaves if isinstance(leaf, ast.Attribute)]
    named = {base.id for base in bases if isinstance(base, ast.Name)}
    return LIBRARY & named - bound_names(leaves)


def _leaves(texts: Iterable[str]) -> list[ast.AST]:
    """Return all nodes of code; a prompt that ends in a bare signature has none."""
    leaves: list[ast.AST] = []
    for text in texts:
        with contextlib.suppress(SyntaxError):
            leaves += ast.walk(ast.parse(text))
    return leaves


def _parts(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of tests, and in place of the function `check` its own."""
    checks = _check_functions(tree)
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id="check"))) if checks:
                continue
            case ast.FunctionDef(name="check") if any(isinstance(leaf, _RETURNS) for leaf in ast.walk(node)):
                yield from [node, *ast.parse(f"assert check({node.args.args[0].arg}) is not False").body]
            case ast.FunctionDef(name="check"):
                yield from node.body
            case _:
                yield node


def _check_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]


def _fails(leaves: Sequence[ast.AST], asserting: set[str]) -> bool:
    """Return whether code can fail as a test: it has an assert, or calls a function that contains one."""
    calls = [leaf.func for leaf in leaves if isinstance(leaf, ast.Call)]
    return (
        any(isinstance(leaf, ast.Assert) for leaf in leaves)
        or any(isinstance(function, ast.Name) and function.id in asserting for function in calls)
        or any(isinstance(function, ast.Attribute) and function.attr[:6] == "assert" for function in calls)
    )


def _asserting(leaves: Sequence[ast.AST]) -> set[str]:
    """Return the names of the tests' own functions that contain an assert, or call one that does."""
    definitions = [(leaf.name, list(ast.walk(leaf))) for leaf in leaves if isinstance(leaf, ast.FunctionDef)]
    names: set[str] = set()
    while new := {name for name, inner in definitions if name not in names and _fails(inner, names)}:
        names |= new
    return names


def _builtin_meant(tests: Asserts) -> str:
    """Return the program's function if it is named like a builtin, such as `sum` in MBPP, and "" otherwise.

    Raises ValueError if that is unclear.
    """
    leaves = _leaves([tests.setup, *tests.tests])
    if expected_names(tests) or "*" in bound_names(leaves):
        return ""
    called = [leaf.func for leaf in leaves if isinstance(leaf, ast.Call)]
    names = {function.id for function in called if isinstance(function, ast.Name)}
    if len(names) != 1:
        raise ValueError(f"the tests call only {sorted(names)}, no function of the program")
    return names.pop()


def _caught(leaves: Sequence[ast.AST]) -> Iterator[str]:
    for leaf in leaves:
        match leaf:
            case ast.ExceptHandler(type=ast.expr() as caught):
                pass
            case ast.Call(func=ast.Attribute(attr=name), args=[caught, *_]) if name in _RAISES:
                pass
            case _:
                continue
        for item in ast.walk(caught):
            yield from filter(None, [getattr(item, "id", None), getattr(item, "attr", None)])
