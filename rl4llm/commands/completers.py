"""What a shell is offered for an argument; asked by argcomplete while somebody types, so nothing slow is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
REGISTERED = {"algorithm.name": ("algorithms", "register_algorithm"), "env.name": ("envs", "register_env")}
"""Where the names that a key may have are registered, and by what; the registries themselves would import torch."""


def configurations(prefix: str, **_: Any) -> Iterable[str]:
    """YAML files, and directories on the way to them."""
    from argcomplete.completers import FilesCompleter

    return FilesCompleter(("yaml", "yml"))(prefix)


def overrides(prefix: str, **_: Any) -> Iterable[str]:
    """Keys of a configuration, values of those that have few, and YAML files to be laid over the first."""
    from rl4llm.config import CHOICES, Config, flatten

    key, equals, _given = prefix.partition("=")
    if equals:
        return [f"{key}={value}" for value in CHOICES.get(key, ()) or names(key)]
    return [*(f"{name}=" for name in flatten(Config())), *configurations(prefix)]


def names(key: str) -> list[str]:
    """What is registered in the package for a key, such as algorithm.name."""
    if key not in REGISTERED:
        return []
    folder, register = REGISTERED[key]
    texts = (file.read_text(encoding="utf-8") for file in (PACKAGE / folder).rglob("*.py"))
    return sorted({name for text in texts for name in re.findall(rf'^@{register}\("(\w+)"\)', text, re.MULTILINE)})
