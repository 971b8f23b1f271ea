"""From layers of nested mappings to typed values, and back to the text that others may read.

`merged` lays a layer over others, `resolved` follows references such as ``${oc.env:NAME}`` and gives each value the type of
its key, and `with_references` writes them back in place of what they stand for.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from rl4llm.config.overrides import annotation, laid_over
from rl4llm.core.errors import ConfigError, did_you_mean, unknown
from rl4llm.core.redact import HIDDEN, is_secret_name, redacted
from rl4llm.core.registry import elsewhere as answer_of
from rl4llm.core.schema import check_fields, fits, hints_of, means_null, refusal, typed

T = TypeVar("T")
Keys = tuple[str | int, ...]

PATH_KEY = re.compile(r"(.+_)?(path|dir|ca)|cache|config|corpus")
"""Names of keys and options for paths, in which ``~`` and ``$NAME`` are expanded."""

OURS = {("model",), ("data",), ("eval",), ("output",), ("sync",)}
"""Sections whose paths this machine opens; a class of the user may take addresses."""

VARIABLE = re.compile(r"oc\.env:\s*([^,}\s]+)")
NODE = re.compile(r"""(?:\$\{|oc\.(?:select|deprecated|dict\.\w+):)\s*['"]?([^\s'",:{}$]*)(?![^\s'",{}$])""")
"""A key in a reference, such as ``${key.sub}``."""


Reference = tuple[str, Any, bool]
"""The text of a reference, the value that it stands for, and whether that is secret."""


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where values come from: the keys that a file or an override set, and the references among them."""

    keys: frozenset[str] = frozenset()
    references: Mapping[Keys, Reference] = dataclasses.field(default_factory=dict)


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return every leaf of nested mappings by its dotted key."""
    if not isinstance(values, Mapping):
        return {prefix[:-1]: values}
    return {key: value for name in values for key, value in flatten(values[name], f"{prefix}{name}.").items()}


def merged(values: dict[str, Any], layer: Mapping[str, Any], free: Iterable[str]) -> dict[str, Any]:
    """Return values with a layer laid over them; the sections `free` have other keys with another name.

    Raises ConfigError for an unknown key, and for a value in place of a section.
    """
    over: dict[str, Any] = laid_over(values, layer)
    _check_keys(flatten(over), flatten(values), free)
    for section in free:
        name = layer.get(section, {}).get("name")
        if name not in (None, values[section].get("name")):
            over[section] = dict(layer[section])
    return over


def _check_keys(leaves: Mapping[str, Any], known: Mapping[str, Any], free: Iterable[str]) -> None:
    sections, free = [f"{section}.name" for section in free], (*free, "rewards", "parts")
    names = [key for key in known if key.split(".")[0] not in free]
    for key in leaves:
        if any(name.startswith(f"{key}.") for name in [*names, *sections]):
            raise ConfigError(refusal(key, leaves[key], dict))
        section, _, leaf = key.rpartition(".")
        if key.split(".")[0] in free or key in names:
            continue
        if answer := answer_of("key", key):
            raise ConfigError(f"Unknown configuration key: {answer}")
        inner = [name.removeprefix(f"{section}.") for name in names if name.startswith(f"{section}.")]
        same = [name for name in names if name.rpartition(".")[2] == leaf]
        near = (
            did_you_mean(leaf, inner).replace("'", f"'{section}.", 1) if inner else did_you_mean(key, names)
        )
        near = f" Did you mean {same[0]!r}?" if same else near
        listed = [f"{section}.{name}" for name in inner] or {
            name.split(".")[0]: 0 for name in [*names, *free]
        }
        raise ConfigError(f"Unknown configuration key {key!r}.{near} Known: {', '.join(listed)}.")


def resolved(
    config: Any, values: Mapping[str, Any], *, of_run: bool = False
) -> tuple[dict[str, Any], Mapping[Keys, Reference]]:
    """Return merged values without references, and the references; raise ConfigError for a wrong value.

    What a reference stands for is read as if it were written in its place. `of_run` hides references to unset variables.
    """

    def typed_leaf(keys: Keys, value: Any) -> Any:
        hint = annotation(config, keys)
        if means_null(value, hint):
            raise ConfigError(refusal(".".join(map(str, keys)), value, hint))
        return typed(_expanded(keys, value), hint)

    try:
        tree = OmegaConf.create(_changed(values, typed_leaf))
        texts = {keys: text for keys, text in _leaves(OmegaConf.to_container(tree)) if "${" in str(text)}
        for keys in texts if of_run else ():
            try:
                _at(tree, keys)
            except InterpolationResolutionError:
                if not fits(HIDDEN, annotation(config, keys)):
                    raise
                _at(tree, keys[:-1])[keys[-1]] = HIDDEN
        if missing := sorted(OmegaConf.missing_keys(tree)):
            raise ConfigError(f"{missing[0]} is not set. Set it in the file, or with {missing[0]}=...")
        plain = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    plain = _changed(plain, typed_leaf)
    return plain, _references(texts, plain)


def built(config: type[T], values: Mapping[str, Any]) -> T:
    """Return the configuration of values without references; raise ConfigError for a wrong one."""
    item: T = _built(config, _changed(values, lambda keys, value: typed(value, annotation(config, keys))))
    check_fields(item)
    return item


def _references(texts: Mapping[Keys, str], values: Any) -> dict[Keys, Reference]:
    """Return the references if one of them reads the environment or a secret, since others may refer to that one.

    A value is secret by its key, its form or its variable's name, and if it equals a secret one. A text that refers to a
    secret is secret, and so is all that a secret text refers to, which may be a piece of the secret.
    """
    if not texts:
        return {}
    visible = redacted(values)
    secret = {tuple(map(str, keys)) for keys, value in _leaves(values) if _at(visible, keys) != value}
    secret |= {
        ("oc.env", name) for text in texts.values() for name in VARIABLE.findall(text) if is_secret_name(name)
    }
    nodes = {
        keys: {tuple(map(str, keys)), *_targets(keys, text), ("=", str(_at(values, keys)))}
        for keys, text in texts.items()
    }
    for _ in nodes:  # as far as the longest chain
        secret |= {node for group in nodes.values() if _meet(group, secret) for node in group}
    if not any(group <= secret or VARIABLE.search(texts[keys]) for keys, group in nodes.items()):
        return {}
    return {keys: (text, _at(values, keys), nodes[keys] <= secret) for keys, text in texts.items()}


def _targets(keys: Keys, text: str) -> Iterator[tuple[str, ...]]:
    """Yield the variables, keys and sections that a text refers to; () for a computed key, which may be any."""
    yield from (("oc.env", name) for name in VARIABLE.findall(text))
    for name in NODE.findall(text):
        dots = len(name) - len(name.lstrip("."))  # .key is beside this one
        yield (*map(str, keys[:-dots] if dots else ()), *re.findall(r"[^.\[\]]+", name))


def _meet(group: Iterable[tuple[str, ...]], secret: Iterable[tuple[str, ...]]) -> bool:
    """Return whether one of the keys is, contains or is in a secret one."""
    return any(keys[: len(other)] == other[: len(keys)] for keys, other in itertools.product(group, secret))


def _built(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass, and those in it, from nested mappings."""
    hints = hints_of(config)
    for name in values.keys() - hints.keys():  # such as "lora.rank" of a mapping
        raise ConfigError(unknown("the key", name, hints))
    sections = {
        name: _built(hints[name], values[name]) for name in values if dataclasses.is_dataclass(hints[name])
    }
    return config(**{**values, **sections})


def _expanded(keys: Keys, text: Any) -> Any:
    """Return a path with ``~`` and ``$NAME`` expanded; raise ConfigError for an unset variable or a URL."""
    if not isinstance(text, str) or not PATH_KEY.fullmatch(str(keys[-1])):
        return text
    expanded = os.path.expanduser(os.path.expandvars(text))
    # A directory of that name would be made, and a run would be lost in it.
    is_url = keys[-2:-1] in OURS and re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text)
    if is_url or re.match(r"~|.*\$\w", expanded):
        problem = "is an address, not a path" if is_url else f"names {expanded!r}, which is unset or unknown"
        raise ConfigError(f"{'.'.join(map(str, keys))}={text!r} {problem}. Write a path of this machine.")
    return expanded


def with_references(
    values: Any, references: Mapping[Keys, Reference], keys: Keys = (), *, escape: bool = False
) -> Any:
    """Return resolved values with references in place of what they stand for, except where it was replaced since.

    With `escape`, a literal ``${`` is not read as a reference.
    """
    if keys in references and references[keys][1] == values:
        return references[keys][0]
    if isinstance(values, Mapping | list):
        names = values.items() if isinstance(values, Mapping) else enumerate(values)
        items = {
            name: with_references(item, references, (*keys, name), escape=escape) for name, item in names
        }
        return items if isinstance(values, Mapping) else list(items.values())
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", values) if escape and isinstance(values, str) else values


def _changed(values: Any, change: Callable[[Keys, Any], Any], keys: Keys = ()) -> Any:
    """Return a copy of nested mappings and lists in which each leaf is replaced."""
    if isinstance(values, Mapping):
        return {name: _changed(value, change, (*keys, name)) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_changed(value, change, (*keys, number)) for number, value in enumerate(values)]
    return change(keys, values)


def _leaves(values: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    if not isinstance(values, dict | list):
        yield keys, values
        return
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield from _leaves(value, (*keys, name))


def _at(values: Any, keys: Iterable[str | int]) -> Any:
    """Return the item at a path of keys, or None."""
    for name in keys:
        try:
            values = values[name]
        except (LookupError, TypeError):  # it was replaced since
            return None
    return values
