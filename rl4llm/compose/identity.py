"""What the keys of a run name: digests of rows, chat template, tokenizer and weights, and of the user's own code.

A resumed run has the same contents, or is refused. Code may change, as people mend rewards; a warning then names it.
"""

from __future__ import annotations

import ast
import dis
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

import rl4llm
from rl4llm.core.images import Picture
from rl4llm.runs.tensor_file import tensors_digest

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
INSTALLED = {"site-packages", "dist-packages"}
OTHERS = {"rl4llm", *sys.stdlib_module_names, *sys.builtin_module_names}
METHODS = (types.FunctionType, classmethod, staticmethod)
HOLDERS = (list, tuple, set, frozenset, dict, types.MappingProxyType)
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
GLOBALS, ATTRIBUTES = {"LOAD_GLOBAL", "LOAD_NAME"}, {"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"}
# where a class is, which changes with the lines above it
PLACES = {"__firstlineno__", "__static_attributes__"}
PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    list: iter,
    tuple: iter,
    dict: lambda thing: chain.from_iterable(thing.items()),
    types.MappingProxyType: lambda thing: chain.from_iterable(thing.items()),
    types.MethodType: lambda thing: (thing.__func__, thing.__self__),
    partial: lambda thing: (thing.func, thing.args, thing.keywords),
    property: lambda thing: (thing.fget, thing.fset, thing.fdel),
    cached_property: lambda thing: (thing.func,),
    classmethod: lambda thing: (thing.__func__,),
    staticmethod: lambda thing: (thing.__func__,),
}
"""What is read of a thing that has code inside."""

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
        named: dict[str, list[str]] = {}
        for name, thing in _entries(list(things), set()) if self.first else ():
            try:
                digest = code_digest(thing)
            except Exception:  # noqa: BLE001 - a user's objects may raise anything, and only a warning needs it
                digest = "unreadable"
            named.setdefault(name, []).append(digest)
        self.code.update({name: "-".join(digests) for name, digests in named.items()})


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
    kept = text[max(0, text.find('"added_tokens"')) :]  # after padding and truncation, which belong to a call
    return _hash(f"{kept}{sorted(map(str, getattr(tokenizer, 'special_tokens_map', {}).items()))}")


def code_digest(thing: Any) -> str:
    """Return a hash of a user's function, class or object, and of the code and constants in user's modules that it uses.

    It is a hash of compiled code, so lines, comments and docstrings do not matter, and cells of notebooks have one too.
    Constants of a module count as they are written in its file. Of an object count its class and the attributes that its
    constructor names. What a function imports when it runs, other packages, and numbers in arrays do not count.
    """
    reader = _Reader()
    reader.read(thing)
    return _hash("\n".join([*reader.lines, _installed(_named(thing))]))


def _entries(thing: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield each function, class and object of a user that `thing` is, or that it holds, with its name."""
    if isinstance(thing, PLAIN) or id(thing) in seen or (isinstance(thing, HOLDERS) and len(thing) > TABLE):
        return
    seen.add(id(thing))
    if isinstance(thing, HOLDERS):
        for item in list(thing.values() if isinstance(thing, Mapping) else thing):
            yield from _entries(item, seen)
    elif _is_users(named := _named(thing)) or (_is_entry(thing, named) and _installed(named)):
        yield named.__name__.strip("<>"), thing
    elif type(thing).__module__.startswith("rl4llm."):
        for name, item in _attributes(thing).items():
            if name != "dataset":
                yield from _entries(item, seen)


def _named(thing: Any) -> Any:
    """Return the function or class that an object is made of."""
    while isinstance(thing, partial | types.MethodType):
        thing = thing.func if isinstance(thing, partial) else thing.__func__
    if isinstance(thing, types.FunctionType):
        return thing if _is_users(thing) else inspect.unwrap(thing)
    return thing if isinstance(thing, type | types.ModuleType) else type(thing)


def _is_entry(thing: Any, named: Any) -> bool:
    """Return whether something of an installed package plays a part in a run, as its clients and locks do not."""
    return named is not type(thing) or any(kind.__module__.startswith("rl4llm.") for kind in named.__mro__)


def _module(named: Any) -> tuple[str, str]:
    """Return the top package and the file of a function, class or module; "" for what has none."""
    written = getattr(named, "__globals__", {}).get("__name__")  # a decorator may have renamed the module
    own = named.__name__ if isinstance(named, types.ModuleType) else getattr(named, "__module__", "")
    module = str(written or own or "")
    found = None if module == "__main__" else sys.modules.get(module)  # of a notebook, whatever runs it
    return module.partition(".")[0], getattr(found, "__file__", None) or ""


def _is_users(named: Any) -> bool:
    """Return whether a function, class or module belongs neither to rl4llm, Python nor an installed package."""
    top, file = _module(named)
    return top not in OTHERS and not INSTALLED & set(Path(file).parts)


def _installed(named: Any) -> str:
    """Return a hash of the file of an installed package, "" for what belongs to none."""
    top, file = _module(named)
    installed = top not in OTHERS and not _is_users(named) and Path(file).is_file()
    return _hash(Path(file).read_bytes()) if installed else ""


def _attributes(thing: Any) -> dict[str, Any]:
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    kept = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return kept | getattr(thing, "__dict__", {})


class _Reader:
    """Collects the lines that a hash of code is made of; what it has read already is a number."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no other object gets the id of one that was read
        self._used: set[tuple[int, str]] = set()
        self._assigned = cache(_assigned)

    def read(self, thing: Any) -> None:
        """Add a value of any kind."""
        if isinstance(thing, PLAIN):
            self.lines.append(ascii(thing))
        elif isinstance(thing, set | frozenset):
            self.lines.append(f"set {sorted(ADDRESS.sub('', ascii(item)) for item in thing)}")
        elif isinstance(thing, tuple | types.CodeType):  # which a cached module may hold in copies
            self._read_new(thing)
        elif id(thing) in self._seen:
            self.lines.append(f"#{self._seen[id(thing)]}")
        else:
            self._seen[id(thing)] = len(self._seen)
            self._kept.append(thing)
            self._read_new(thing)

    def _read_new(self, thing: Any) -> None:
        self.lines.append(type(thing).__name__)
        if parts := next((parts for kind, parts in PARTS.items() if isinstance(thing, kind)), None):
            self._all(parts(thing))
        elif isinstance(thing, types.CodeType):
            self._code(thing)
        elif isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(thing, type):
            self._class(thing)
        elif "__wrapped__" in getattr(thing, "__dict__", {}):  # such as that of functools.cache
            self.read(thing.__wrapped__)
        elif _is_users(type(thing)):
            held = _attributes(thing)
            options = inspect.signature(type(thing).__init__).parameters
            self._all((type(thing), {name: held[name] for name in options if name in held}))

    def _all(self, things: Iterable[Any]) -> None:
        for thing in things:
            self.read(thing)

    def _class(self, kind: type) -> None:
        self.lines.append(kind.__qualname__)
        self._all(kind.__bases__ if _is_users(kind) else ())
        for name, value in sorted(vars(kind).items()) if _is_users(kind) else ():
            if not name.startswith("__") or isinstance(value, METHODS):
                self.lines.append(name)
                self.read(value)

    def _function(self, function: types.FunctionType) -> None:
        if not _is_users(function):
            self.lines.append(function.__qualname__)
            self.read(getattr(function, "__wrapped__", None))
            return
        self._all((function.__code__, function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is still empty
                self.read(cell.cell_contents)
        code = function.__code__
        self._globals(function.__globals__, _names(code, GLOBALS), _names(code, ATTRIBUTES))

    def _code(self, code: types.CodeType) -> None:
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_varnames
        self.lines.append(f"{counts}{code.co_exceptiontable!r}")
        instructions = list(dis.get_instructions(code))
        for one, following in zip(instructions, [*instructions[1:], None], strict=True):
            if one.opname != "NOP" and not (following and following.argval in PLACES):
                self.lines.append(one.opname)
                if one.opname == "LOAD_CONST":
                    self.read(one.argval)
                else:
                    self.lines.append(ascii(one.argval))

    def _globals(self, known: dict[str, Any], names: Iterable[str], attributes: Iterable[str]) -> None:
        """Add what names of a module mean; of other modules of the user, what the code takes from them."""
        for name in sorted(set(names) & known.keys()):
            if (id(known), name) in self._used:
                continue
            self._used.add((id(known), name))
            value, file = known[name], known.get("__file__")
            self.lines.append(name)
            if isinstance(value, types.ModuleType):
                if _is_users(value):
                    self._globals(vars(value), attributes, attributes)
            elif file and name in self._assigned(file):
                text, used = self._assigned(file)[name]
                self.lines.append(text)
                self._globals(known, used, attributes)
                self._all(item for _, item in _entries(value, set()))
            elif file or not isinstance(value, list | dict | set):  # those of a notebook change while it runs
                self.read(value)


def _names(code: types.CodeType, operations: set[str]) -> set[str]:
    """Return the names that code, and code inside it, uses in these operations."""
    found = {str(one.argval) for one in dis.get_instructions(code) if one.opname in operations}
    nested = [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return found.union(*(_names(inner, operations) for inner in nested))


def _assigned(file: str) -> Mapping[str, tuple[str, set[str]]]:
    """Return how a file assigns its names, without comments, and the names that this uses."""
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return {}
    found: dict[str, tuple[str, set[str]]] = {}
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            names = [item for item in ast.walk(node) if isinstance(item, ast.Name)]
            for name in (item.id for item in names if isinstance(item.ctx, ast.Store)):
                text, used = found.get(name, ("", set()))
                found[name] = f"{text}\n{ast.unparse(node)}", used | {item.id for item in names}
    return found


def _hash(data: str | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data.encode() if isinstance(data, str) else data)
