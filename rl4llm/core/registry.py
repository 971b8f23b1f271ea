"""Names that a configuration may use, and the classes behind them.

Each folder of `rl4llm/extensions` declares the names that it adds in its `manifest.py`:

    PROVIDES = {"rl4llm.envs": {"chess": "rl4llm.extensions.chess.env:ChessEnv"}}

The groups are those of the entry points by which installed packages add names. The group `PARTS` has what the library asks
for by a name that no configuration uses. A manifest is data: it is read, and nothing of its extension is imported.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from opcode import opmap
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

from rl4llm.core.errors import ConfigError, did_you_mean, unknown

T = TypeVar("T")
Item = TypeVar("Item")
Named = TypeVar("Named", bound=Callable[..., Any])
EXTENSIONS = Path(__file__).parents[1] / "extensions"
PARTS = "rl4llm.parts"


class Registry(Generic[T]):
    """A table of named things. Callers never branch on the names; they use only the contract.

    >>> ALGORITHMS = Registry("algorithm.name", table={"ppo": "rl4llm.algorithms.ppo:PPO"})
    >>> @ALGORITHMS.register("grpo")
    ... class GRPO: ...
    >>> ALGORITHMS["grpo"] is GRPO
    True
    >>> list(ALGORITHMS)  # imports nothing
    ['grpo', 'ppo']

    A name of the form ``package.module:Class`` is imported, so users need not register anything.

    Args:
        where: the configuration key that the names are for.
        base: the ``module:Class`` that whatever is imported must be a subclass of.
        table: ``"name": "module:Class"`` of what the library has; a module is imported when its name is looked up.
        group: what extensions call these names in their manifests, and installed packages in their entry points.
        extras: ``"name": "package"`` of packages in the folder `extras/` of the repository that add names.
    """

    def __init__(
        self,
        where: str,
        base: str | None = None,
        *,
        table: Mapping[str, str] | None = None,
        group: str | None = None,
        extras: Mapping[str, str] | None = None,
    ):
        self.where = where
        self.base = base
        self.group = group
        self.extras = dict(extras or {})
        self._complete = False
        self.builtin = tuple(table or ())
        self._items: dict[str, T | str] = dict(table or {})

    @overload
    def register(self, name: Named) -> Named: ...
    @overload
    def register(self, name: str | None = None) -> Callable[[Item], Item]: ...
    def register(self, name: Any = None) -> Any:
        """Decorate a class or function to add it under `name`; every name is unique.

        Without parentheses, or without a name in them, it is registered under its `__name__`.
        """
        if name is None or isinstance(name, str):
            return lambda item: self._add(item, name)
        return self._add(name, None)

    def _add(self, item: Item, name: str | None) -> Item:
        if name is None:
            name = str(item.__name__)  # type: ignore[attr-defined]  # which Python says that others lack
        entry = self._items.get(name)
        if entry is not None and entry is not item and entry != _path(item) and not _again(entry, item):
            raise ConfigError(f"{self.where}={name!r} is already registered as {entry!r}.")
        self._items[name] = cast(T, item)  # what is decorated keeps its own type for whoever calls it
        return item

    def __getitem__(self, name: str) -> T:
        if name in self:
            item = self._items[name]
            if isinstance(item, str):
                item = self._items[name] = self._checked(name, self._loaded(name, item))
            return item
        if ":" in name:
            accepted = f"a registered name ({', '.join(self)}) or 'package.module:Class'"
            return self._checked(name, imported(self.where, name, accepted))
        problem = f"{unknown(self.where, name, self._items)} For a custom one, use 'package.module:Name'."
        if name in self.extras:
            install = f"Next, in a checkout of rl4llm: pip install ./extras/{self.extras[name]}"
            problem = f"{self.where}={name!r} is in a package that is not installed. {install}"
        raise ConfigError(problem)

    def _loaded(self, name: str, path: str) -> Any:
        try:
            return load(path)
        except (ImportError, AttributeError) as error:
            if path.startswith("rl4llm."):
                raise
            # else one broken package would end every command
            raise ConfigError(
                f"{self.where}={name!r} is {path}, which cannot be imported: {error}."
            ) from error

    def _checked(self, name: str, item: Any) -> T:
        base = load(self.base) if self.base else object
        if self.base and not (isinstance(item, type) and issubclass(item, base)):
            accepted = f"a subclass of {base.__name__}"
            raise ConfigError(f"{self.where}={name!r} is {item!r:.100}. Accepted: {accepted}.")
        return cast(T, item)

    def _add_provided(self) -> None:
        """Add the names of extensions and installed packages; existing names stay unchanged."""
        if self.group is None or self._complete:
            return
        self._complete = True
        self._items = {**provided(self.group), **self._items}

    def __contains__(self, name: str) -> bool:
        self._add_provided()
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        self._add_provided()
        return iter(sorted(self._items))

    def path_of(self, name: str) -> str:
        """Return the ``module:Class`` of a registered name without importing it."""
        item = self._items[name]
        return item if isinstance(item, str) else _path(item)

    def name_of(self, item: T) -> str:
        """Return the name of an item in a configuration."""
        path = _path(item)
        return next((name for name, entry in self._items.items() if entry in (item, path)), path)


def load(path: str) -> Any:
    """Import the ``module:attribute`` of a table."""
    module, _, attribute = path.partition(":")
    item: Any = (importlib.import_module if module in sys.modules else _import_uncollected)(module)
    for name in attribute.split(".") if attribute else ():
        item = getattr(item, name)
    return item


def needed(package: str, what: str, extra: str = "") -> Any:
    """Import an optional package; without it, raise ConfigError with what needs it and the extra that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        install = f"pip install 'rl4llm[{extra or package}]'"
        raise ConfigError(f"{what} needs the package {package}: {install}.") from error


def _import_uncollected(module: str) -> Any:
    """Import a module without garbage collection, which would visit each of half a million objects several times.

    Training collects what its import left, when it begins.
    """
    if not gc.isenabled():
        return importlib.import_module(module)
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, where only a full collection visits them
        gc.enable()


@cache
def provided(group: str) -> Mapping[str, str]:
    """Return the names that extensions and installed packages add to a group, and the ``module:attribute`` of each."""
    names = {point.name: point.value for point in importlib.metadata.entry_points(group=group)}
    for manifest in manifests().values():
        names |= manifest.get(group, {})
    return names


@cache
def manifests() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Return what each extension provides, by the name of its folder; they are read once."""
    return {file.parent.name: read_manifest(file) for file in sorted(EXTENSIONS.glob("*/manifest.py"))}


def read_manifest(file: Path) -> Mapping[str, Mapping[str, str]]:
    """Return the PROVIDES of a manifest, a literal."""
    text = file.read_text(encoding="utf-8").partition("\nPROVIDES = ")[2]
    return cast("Mapping[str, Mapping[str, str]]", ast.literal_eval(text))


def from_extension(name: str, what: str) -> Any:
    """Return what an extension provides to the library under this name; `what` is the user's request.

    Raises ConfigError if no extension provides it.
    """
    if (path := provided(PARTS).get(name)) is None:
        raise ConfigError(f"{what} needs an extension of rl4llm that provides {name!r}, and none does.")
    return load(path)


def elsewhere(kind: str, name: str) -> str:
    """Return a sentence about a name that another project has; "" for other names.

    `kind` is "key" for configuration keys and "name" for what Python imports.
    """
    path = provided(PARTS).get(f"answer_{kind}")
    return str(load(path)(name)) if path else ""


def lazy(module: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return ``__getattr__`` and ``__all__`` of a package that imports its names on first use.

    The stub beside its `file` has the names and their modules; a package without a stub has no names. Of a name that another
    project has, the error says where it is here.
    """

    homes = stubbed(Path(file).with_suffix(".pyi"))

    def attribute(name: str) -> Any:
        if name in homes:
            return load(f"{homes[name]}:{name}")
        problem = f"module {module!r} has no attribute {name!r}."
        answer = "" if name.startswith("_") else elsewhere("name", name)
        if not answer:
            raise AttributeError(problem)
        # `from module import name` would replace the message of an AttributeError
        frame = sys._getframe(1)
        importing = frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]
        raise (ImportError if importing else AttributeError)(f"{problem} The name is {answer}")

    return attribute, list(homes)


def stubbed(stub: Path) -> dict[str, str]:
    nodes = ast.parse(stub.read_text(encoding="utf-8")).body if stub.exists() else ()
    return {
        alias.name: node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def imported(where: str, name: str, accepted: str = "'package.module:function'") -> Any:
    """Import ``package.module:attribute``; raise ConfigError, which lists what is `accepted`, if that fails."""
    module_name, _, attribute = name.partition(":")
    names: list[str] = []
    try:
        names = dir(module := importlib.import_module(module_name))
        return getattr(module, attribute)
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError, NameError) as error:
        near = did_you_mean(attribute, names)
        raise ConfigError(
            f"{where}={name!r} cannot be imported: {error}.{near} Accepted: {accepted}, "
            "found from the directory that the command is run in, or on PYTHONPATH."
        ) from error


def import_name(item: object) -> str | None:
    """Return the ``package.module:name`` that imports exactly this item, or None."""
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", "")
    return f"{module}:{name}" if name and getattr(sys.modules.get(module or ""), name, None) is item else None


def _again(entry: object, item: object) -> bool:
    """Return whether a prompt or a notebook's cell, which belong to no file, defines an item again."""
    in_file = getattr(sys.modules["__main__"], "__file__", None) is not None
    return not in_file and getattr(item, "__module__", "") == "__main__" and _path(item) == _path(entry)


def _path(item: object) -> str:
    return f"{getattr(item, '__module__', '')}:{getattr(item, '__qualname__', item)}"
