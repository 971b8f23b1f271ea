"""Names that a configuration may use, and the classes behind them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

from rl4llm.core.errors import ConfigError, unknown

T = TypeVar("T")
Item = TypeVar("Item")


class Registry(Generic[T]):
    """A table of named things. Nobody may branch on the names: whoever looks one up uses only its contract.

    >>> ALGORITHMS = Registry("algorithm.name")
    >>> @ALGORITHMS.register("grpo")
    ... class GRPO: ...
    >>> ALGORITHMS["grpo"] is GRPO
    True

    A name of the form ``package.module:Class`` is imported, so users need not register anything; with a `base`, what is
    imported must be a subclass of it.
    """

    def __init__(self, where: str, base: type | None = None):
        self.where = where
        self.base = base
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[Item], Item]:
        """Decorator that adds a class or function under `name`; a name can be taken only once."""

        def add(item: Item) -> Item:
            if name in self._items and self._items[name] is not item:
                raise ConfigError(f"{self.where}={name!r} is already registered as {self._items[name]!r}.")
            self._items[name] = cast(T, item)  # what is decorated keeps its own type for whoever calls it
            return item

        return add

    def __getitem__(self, name: str) -> T:
        if name in self._items:
            return self._items[name]
        if ":" in name:
            return self._imported(name)
        raise ConfigError(f"{unknown(self.where, name, self._items)} One of your own is 'package.module:Name'.")

    def _imported(self, name: str) -> T:
        item = imported(self.where, name, f"a registered name ({', '.join(self)}) or 'package.module:Class'")
        if self.base is not None and not (isinstance(item, type) and issubclass(item, self.base)):
            raise ConfigError(f"{self.where}={name!r} is {item!r:.100}. Accepted: a subclass of {self.base.__name__}.")
        return cast(T, item)

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))

    def name_of(self, item: T) -> str:
        """What a configuration calls it."""
        names = (name for name, known in self._items.items() if known is item)
        return next(names, f"{getattr(item, '__module__', '')}:{getattr(item, '__qualname__', item)}")


def imported(where: str, name: str, accepted: str = "'package.module:function'") -> Any:
    """What ``package.module:attribute`` names; raises ConfigError, which says what is `accepted`, where there is none."""
    module_name, colon, attribute = name.partition(":")
    try:
        if not colon:
            raise ImportError("there is no ':' in it")
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{where}={name!r} cannot be imported: {error}. Accepted: {accepted}, "
            "found from the directory that the command is run in, or on PYTHONPATH."
        ) from error


def import_name(item: object) -> str | None:
    """The ``package.module:name`` under which a registry imports this very item; None where there is none."""
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", "")
    return f"{module}:{name}" if name and getattr(sys.modules.get(module or ""), name, None) is item else None
