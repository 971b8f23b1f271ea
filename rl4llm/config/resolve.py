"""References in a configuration, such as ``${oc.env:NAME}``: resolved for use, but written as text."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, ValidationError

from rl4llm.core.errors import ConfigError
from rl4llm.core.redact import HIDDEN, is_secret_name, redacted

Path = tuple[str | int, ...]
References = dict[Path, tuple[str, Any]]
"""The text of each reference and the value that it stands for, by the path of keys and indices to it."""

PATH_KEY = re.compile(r"(.+_)?(path|dir|ca)|cache|config|corpus")
"""Names of keys and options for paths, in which ``~`` and ``$NAME`` are expanded."""

OWN = {("model",), ("data",), ("eval",), ("output",), ("sync",)}
"""Sections whose paths this machine opens; a class of the user may take addresses."""

VARIABLE = re.compile(r"oc\.env:\s*([^,}\s]+)")


def references_in(merged: DictConfig) -> References:
    """Return the references of a configuration if one of them reads the environment, since others may refer to that one."""
    texts = _texts(merged)
    if not any(VARIABLE.search(text) for text in texts.values()):
        return {}
    values = OmegaConf.to_container(merged, resolve=True)
    return {path: (text, _at(values, path)) for path, text in texts.items()}


def expand_paths(merged: DictConfig) -> None:
    """Expand ``~`` and ``$NAME`` in the values of `PATH_KEY`; raise ConfigError for an unset variable or a URL."""
    for path, text in _leaves(OmegaConf.to_container(merged)):
        if isinstance(text, str) and PATH_KEY.fullmatch(str(path[-1])):
            expanded = os.path.expanduser(os.path.expandvars(text))
            # A directory of that name would be made, and a run would be lost in it.
            is_url = path[-2:-1] in OWN and re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text)
            if is_url or re.match(r"~|.*\$\w", expanded):
                key = ".".join(map(str, path))
                problem = (
                    "is an address, not a path"
                    if is_url
                    else f"names {expanded!r}, which is unset or unknown"
                )
                raise ConfigError(f"{key}={text!r} {problem}. Write a path of this machine.")
            _holder(merged, path)[path[-1]] = expanded


def _holder(merged: DictConfig, path: Path) -> Any:
    holder: Any = merged
    for name in path[:-1]:
        holder = holder[name]
    return holder


def hide_unset(merged: DictConfig) -> None:
    """Replace references that cannot be resolved with `HIDDEN`."""
    for path in _texts(merged):
        holder = _holder(merged, path)
        try:
            holder[path[-1]]
        except InterpolationResolutionError:
            # of a number; reading the configuration then names the variable
            with contextlib.suppress(ValidationError):
                holder[path[-1]] = HIDDEN


def written(values: dict[str, Any], references: References, *, elsewhere: bool = False) -> dict[str, Any]:
    """Return a resolved configuration as it may be written: without secrets, and with references as text.

    `elsewhere` keeps as text only what is secret: other variables may have another value on another machine.
    """
    secret = _secret_paths(values, references)
    for path, (text, value) in references.items():
        holder = _at(values, path[:-1])
        is_hidden = path in secret or not elsewhere
        if is_hidden and _at(holder, path[-1:]) == value:  # not where it was replaced since
            holder[path[-1]] = text
    visible = redacted(values)
    assert isinstance(visible, dict)
    return visible


def variables(values: dict[str, Any], references: References) -> dict[str, bool]:
    """Return the environment variables that a configuration reads, and whether each holds a secret."""
    secret = _secret_paths(values, references)
    secrets: dict[str, bool] = {}
    for path, (text, _) in references.items():
        for name in VARIABLE.findall(text):
            secrets[name] = secrets.get(name, False) or path in secret
    return secrets


def _secret_paths(values: dict[str, Any], references: References) -> set[Path]:
    """Return the references whose value is secret by its key, form or variable's name, or equals a secret one."""
    visible = redacted(values)
    secret = {
        path
        for path, (text, value) in references.items()
        if _at(visible, path) != _at(values, path) or any(map(is_secret_name, VARIABLE.findall(text)))
    }
    same = {str(references[path][1]) for path in secret}
    return {path for path, (_, value) in references.items() if path in secret or str(value) in same}


def _texts(merged: DictConfig) -> dict[Path, str]:
    return {path: value for path, value in _leaves(OmegaConf.to_container(merged)) if "${" in str(value)}


def _leaves(values: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if not isinstance(values, dict | list):
        yield path, values
        return
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield from _leaves(value, (*path, name))


def _at(values: Any, path: Iterable[str | int]) -> Any:
    """Return the item at a path, or None."""
    for name in path:
        try:
            values = values[name]
        except (LookupError, TypeError):  # it was replaced since
            return None
    return values
