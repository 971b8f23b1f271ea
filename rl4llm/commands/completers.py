"""Completions of arguments in a shell. argcomplete calls these functions at each Tab, so they import nothing slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl4llm.core.registry import Registry


def configurations(prefix: str, **_: Any) -> Iterable[str]:
    """Return YAML files, and directories."""
    from argcomplete.completers import FilesCompleter

    return FilesCompleter(("yaml", "yml"))(prefix)


def overrides(prefix: str, **_: Any) -> Iterable[str]:
    """Return configuration keys, the values of a key with few of them, and YAML files to merge over the first."""
    from rl4llm.config import Config, flatten
    from rl4llm.config.overrides import annotation
    from rl4llm.core.schema import choices_of

    key, equals, _given = prefix.partition("=")
    if equals:
        values = choices_of(annotation(Config, key.split("."))) or names(key)
        return [f"{key}={value}" for value in values]
    return [*(f"{name}=" for name in flatten(Config().values())), *configurations(prefix)]


def names(key: str) -> list[str]:
    """Return the names that a key accepts, such as those of algorithm.name."""
    return next((list(table) for table in registries().values() if table.where == key), [])


def registries() -> dict[str, Registry[Any]]:
    """Return the tables of names that a configuration may use."""
    from rl4llm.core.tables import ALGORITHMS, BACKENDS, ENGINES, ENVIRONMENTS, REWARDS

    return {
        "algorithms": ALGORITHMS,
        "environments": ENVIRONMENTS,
        "rewards": REWARDS,
        "engines": ENGINES,
        "backends": BACKENDS,
    }
