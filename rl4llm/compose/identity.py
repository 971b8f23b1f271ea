"""What the keys of a run name: digests of rows, chat template, tokenizer and weights, and of the user's own code.

A resumed run has the same contents, or is refused. Code may change, as people mend rewards; a warning then names it.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import xxhash

import rl4llm
from rl4llm.core.images import Picture
from rl4llm.runs.tensor_file import tensors_digest

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
INSTALLED = {"site-packages", "dist-packages"}
OTHERS = {"rl4llm", *sys.stdlib_module_names, *sys.builtin_module_names}
HOLDERS = (list, tuple, set, frozenset, dict, types.MappingProxyType)
TABLE = 1000  # items, above which a list holds data and no code


@dataclass(frozen=True, slots=True)
class Identity:
    """Digests by the keys that name what is hashed, and those of code by its name; only the first rank computes them."""

    first: bool = True
    contents: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=lambda: {"rl4llm": rl4llm.__version__})

    def add_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows that a name, a split and a limit stand for."""
        key = f"rows of {name}"
        while key in self.contents:  # of another part, or held out
            key += "'"
        if self.first:
            self.contents[key] = rows_digest(rows)

    def add_tokenizer(self, path: str, tokenizer: Any) -> None:
        """Add a tokenizer, and its chat template."""
        if self.first:
            template = json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)
            self.contents[f"tokenizer of {path}"] = tokenizer_digest(tokenizer)
            self.contents[f"chat template of {path}"] = _hash(template)

    def add_weights(self, path: str, model: Any) -> None:
        """Add the weights of a model that never trains."""
        if self.first:
            self.contents[f"weights of the reference {path}"] = tensors_digest(model.named_parameters())

    def add_code(self, things: Iterable[Any]) -> None:
        """Add the digests of the user's functions and classes that objects are, or hold."""
        digests: dict[str, list[str]] = {}
        for named in _entries(list(things), set()) if self.first else ():
            digests.setdefault(named.__name__.strip("<>"), []).append(code_digest(named))
        self.code.update({name: "-".join(parts) for name, parts in digests.items()})


def rows_digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of rows and a hash of all their columns, in order."""
    digest = xxhash.xxh3_64()
    for number in range(len(rows)):
        digest.update(_as_text(rows[number]).encode())
    return f"{len(rows)} rows, {digest.hexdigest()}"


def _as_text(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row, sort_keys=True, default=_as_json)
    except (TypeError, ValueError):
        return ADDRESS.sub("", ascii(row))


def _as_json(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(ascii, value))
    if isinstance(value, Picture):
        return _hash(value.data)
    if hasattr(value, "tolist"):  # arrays, whose text is cut
        return value.tolist()
    return ADDRESS.sub("", str(value))


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a hash of a tokenizer without its chat template."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    text = fast.to_str() if fast is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    vocabulary = text[
        max(0, text.find('"added_tokens"')) :
    ]  # after padding and truncation, which belong to a call
    return _hash(f"{vocabulary}{sorted(map(str, getattr(tokenizer, 'special_tokens_map', {}).items()))}")


def code_digest(named: Any) -> str:
    """Return a hash of the file of a function or class, and of the user's modules that it imports.

    Comments, docstrings and layout do not count. Code that has no file, as in a notebook, counts as it was compiled, and of
    a package that is installed the file alone.
    """
    module = _module(named)
    if module is None:
        return _hash("\n".join(_compiled(named)))
    files: dict[str, str] = {}
    _read(module, files)
    return _hash("\n".join(files[name] for name in sorted(files)))


def _read(module: types.ModuleType, files: dict[str, str]) -> None:
    """Add the syntax tree of a module, and of the user's modules that it imports."""
    file = Path(getattr(module, "__file__", None) or "")  # a stand-in may have none
    if module.__name__ in files or file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError):  # it changed while this process ran
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = node.body[ast.get_docstring(node, clean=False) is not None :]
    files[module.__name__] = ast.dump(tree)
    for name in _imported(tree, module.__package__ or "") if _is_users(module) else ():
        if (imported := sys.modules.get(name)) is not None and _is_users(imported):
            _read(imported, files)


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the names that a file imports, which may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _compiled(named: Any) -> Iterator[str]:
    """Yield the code of a function, or of the functions of a class, without the place where it was written."""
    if isinstance(named, type):
        for name, value in sorted(vars(named).items()):
            yield from (name, *_compiled(value))
    elif isinstance(named, types.FunctionType):
        yield from _compiled(named.__code__)
    elif isinstance(named, types.CodeType):
        yield f"{named.co_code!r} {named.co_names} {named.co_varnames}"
        for constant in named.co_consts:
            yield from _compiled(constant) if isinstance(constant, types.CodeType) else (repr(constant),)


def _entries(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Yield each function and class of a user that `thing` is, or that it holds."""
    if id(thing) in seen or (isinstance(thing, HOLDERS) and len(thing) > TABLE):
        return
    seen.add(id(thing))
    named = _named(thing)
    if isinstance(thing, HOLDERS):
        for item in list(thing.values() if isinstance(thing, Mapping) else thing):
            yield from _entries(item, seen)
    elif _is_users(named) or (_top(named) not in OTHERS and _is_entry(thing, named)):
        yield named
    elif type(thing).__module__.startswith("rl4llm."):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        attributes = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
        for name, item in {**attributes, **getattr(thing, "__dict__", {})}.items():
            if name != "dataset":
                yield from _entries(item, seen)


def _named(thing: Any) -> Any:
    """Return the function or class that an object is made of."""
    while True:
        if isinstance(thing, partial):
            thing = thing.func
        elif isinstance(thing, types.MethodType):
            thing = thing.__func__
        elif inner := inspect.getattr_static(thing, "__wrapped__", None):
            thing = inner
        else:
            return thing if isinstance(thing, type | types.FunctionType) else type(thing)


def _is_entry(thing: Any, named: Any) -> bool:
    """Return whether something of an installed package plays a part in a run, as its clients and locks do not."""
    return named is not type(thing) or any(kind.__module__.startswith("rl4llm.") for kind in named.__mro__)


def _top(named: Any) -> str:
    """Return the top package of a function, class or module."""
    return str(getattr(named, "__module__", None) or named.__name__).partition(".")[0]


def _module(named: Any) -> types.ModuleType | None:
    """Return the module of a function or class, if it has a file."""
    module = named if isinstance(named, types.ModuleType) else sys.modules.get(named.__module__ or "")
    file = getattr(module, "__file__", None)
    cell = isinstance(named, types.FunctionType) and named.__code__.co_filename.startswith("<")
    return module if file and not cell else None


def _is_users(named: Any) -> bool:
    """Return whether a function, class or module belongs neither to rl4llm, Python nor an installed package."""
    module = _module(named)
    return _top(named) not in OTHERS and not (module and INSTALLED & set(Path(module.__file__ or "").parts))


def _hash(data: str | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data.encode() if isinstance(data, str) else data)
