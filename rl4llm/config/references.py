"""References in a configuration, such as ``${oc.env:NAME}``: resolved for use, but written as text."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException, ValidationError

from rl4llm.core.errors import ConfigError
from rl4llm.core.redact import HIDDEN, is_secret_name, redacted

Path = tuple[str | int, ...]
References = dict[Path, tuple[str, Any]]
"""The text of each reference and the value that it stands for, by the path of keys and indices to it."""

PATH_KEY = re.compile(r"(.+_)?(path|dir|ca)|cache|config|corpus")
"""Names of keys and options for paths, in which ``~`` and ``$NAME`` are expanded."""

OWN = [["model"], ["data"], ["eval"], ["output"], ["sync"]]
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
    """Expand ``~`` and ``$NAME`` in the values of `PATH_KEY`. Raise ConfigError for unset variables, empty paths, URLs."""
    for path, text in _leaves(OmegaConf.to_container(merged)):
        if isinstance(text, str) and PATH_KEY.fullmatch(str(path[-1])):
            key, holder = ".".join(map(str, path)), _holder(merged, path)
            holder[path[-1]] = _expanded(key, text)
            with contextlib.suppress(OmegaConfBaseException):  # reading the configuration says what is wrong
                if (
                    key.split(".")[-2:-1] in OWN and holder[path[-1]] == ""
                ):  # it would be the working directory
                    raise ConfigError(f"{key} is empty. Write a path, or leave the key out.")


def _expanded(key: str, text: str) -> str:
    if key.split(".")[-2:-1] in OWN and re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text):
        raise ConfigError(
            f"{key}={text!r} is an address, not a path. Accepted: a directory or file that this machine has, or for a model "
            "and data a name on the hub."
        )
    expanded = os.path.expanduser(os.path.expandvars(text))
    if unset := re.match(r"~[^/]*|.*?(\$\w+)", expanded):
        raise ConfigError(
            f"{key}={text!r}: {unset[1] or unset[0]} is not set or unknown on this machine. Next: set it, or write the path "
            "without it."
        )
    return expanded


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
        inside = (
            name in values
            if isinstance(values, Mapping)
            else isinstance(values, list) and int(name) < len(values)
        )
        if not inside:
            return None
        values = values[name]
    return values
