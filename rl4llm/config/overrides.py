"""Overrides such as ``key.sub=value``, and files of YAML. The type of a key decides how its value is read:

- A text is taken as it is. Only ``null``, an empty value, which is null too, and a text in quotes are read as YAML.
- A list or mapping is YAML. What is in it is read by its own type.
- A number, ``true``, ``false`` and ``null`` are what they look like. Any other value of an option is text.

So ``010``, ``12:30`` and ``no`` are not the numbers and truth values of YAML 1.1.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import hint_in, is_text, takes

WORDS = {"null": None, "": None, "true": True, "false": False}
WHOLE = re.compile(r"[-+]?(0|[1-9]\d*)")
STANDARD = "tag:yaml.org,2002:"
"""The beginning of the tags of YAML."""
ENDLESS = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE)
DECIMAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def read_yaml(text: str, config: Any) -> Any:
    """Return the content of a YAML file, by the types of the configuration class; raise yaml.YAMLError."""
    node = yaml.compose(text, yaml.SafeLoader)
    return {} if node is None else _built(node, config, [])


def layer_of(overrides: Sequence[str] | Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return overrides as nested mappings; `config` is the class of the configuration, whose types decide about texts.

    ``key.0.sub=value`` and ``key[0].sub=value`` are an item of a list.

    >>> layer_of(["output.dir=010", "data.limit=10"], Config)
    {'output': {'dir': '010'}, 'data': {'limit': 10}}
    """
    layer: dict[str, Any] = {}
    pairs = (
        overrides.items() if isinstance(overrides, Mapping) else (_pair(text, config) for text in overrides)
    )
    for key, value in pairs:
        for name in reversed(_names(key)):
            value = {name: value}
        layer = laid_over(layer, value)
    if isinstance(parts := layer.get("parts"), Mapping):  # their keys may be dotted too
        layer["parts"] = {
            name: layer_of(part, config) if isinstance(part, Mapping) else part
            for name, part in parts.items()
        }
    return layer


def _names(key: str) -> list[str]:
    return re.sub(r"\[(\d+)\]", r".\1", key).split(".")


def _pair(text: str, config: Any) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or "" in _names(key):
        raise ConfigError(
            f"{text!r} is not an override. Accepted: key.sub=value, for example training.lr=1e-5."
        )
    try:
        return key, _value(value, config, _names(key))
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(
            f"The value of {key} is not valid YAML: {' '.join(str(error).split())}. "
            f"Next step: quote it, as in '{key}=\"a: b\"'."
        ) from None


def annotation(config: Any, names: Sequence[str | int]) -> Any:
    """Return the annotation of a key of a configuration class; Any for the options of a name."""
    names = names[2:] if list(names[:1]) == ["parts"] else names  # the keys of a part are those of the run
    hint = config
    for name in names:
        hint = hint_in(hint, name)
    return hint if names else Any


def _value(text: str, config: Any, names: list[str]) -> Any:
    hint = annotation(config, names)
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    nested = takes(hint, dict) or dataclasses.is_dataclass(hint) or text.startswith(("[", "{"))
    if not quoted and (is_text(hint) or not nested):
        return _scalar(text, hint)
    try:
        return _built(yaml.compose(text, yaml.SafeLoader), config, names)
    except yaml.YAMLError:
        if not (quoted and is_text(hint)):
            raise
        return text  # such as "yes" or "no"


def _built(node: yaml.Node | None, config: Any, names: list[str]) -> Any:
    """Return what a node of YAML is as the value of the key with these names."""
    if node is not None and (not node.tag.startswith(STANDARD) or "python/" in node.tag):
        raise yaml.YAMLError(f"the tag {node.tag} is not accepted")
    if isinstance(node, yaml.SequenceNode):
        return [_built(item, config, [*names, str(number)]) for number, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
            raise yaml.YAMLError("a key is a list or a mapping")
        keys = [str(key.value) for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"a mapping has the key {twice[0]!r} twice")
        yaml.SafeLoader("").flatten_mapping(node)  # those of another mapping, "<<: *name"
        pairs = {str(key.value): item for key, item in node.value}
        return {key: _built(item, config, [*names, key]) for key, item in pairs.items()}
    if not isinstance(node, yaml.ScalarNode) or node.tag == f"{STANDARD}null":
        return None
    return _scalar(node.value, annotation(config, names)) if node.style is None else node.value


def _scalar(text: str, hint: Any) -> Any:
    if is_text(hint):
        return None if text in ("", "null") else text
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if WHOLE.fullmatch(text):
        return int(text)
    if ENDLESS.fullmatch(text):
        return float(text.replace(".", ""))
    return float(text) if DECIMAL.fullmatch(text) and not re.match(r"[-+]?0\d", text) else text


def laid_over(below: Any, above: Any, where: str = "") -> Any:
    """Return a value with another one laid over it: keys of mappings, and items of a list by number, are set one by one."""
    if isinstance(below, list) and _numbers(above):
        items = list(below)
        for number, value in above.items():
            if int(number) >= len(items):
                raise ConfigError(
                    f"{where}.{number} is not an item: {where} has {len(items)}, counted from 0. Next: set the whole list."
                )
            item = items[int(number)]
            named = isinstance(item, str) and isinstance(value, Mapping)  # as in rewards=[math]
            items[int(number)] = laid_over({"name": item} if named else item, value, f"{where}.{number}")
        return items
    for kind, other, words in ((list, Mapping, "a list"), (Mapping, list, "a mapping of keys")):
        if isinstance(below, kind) and isinstance(above, other) and not _numbers(below):
            raise ConfigError(f"{where}={above!r:.200} is not accepted. Accepted: {words}, as it is so far.")
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    return {
        **below,
        **{name: laid_over(below.get(name), above[name], f"{where}.{name}".lstrip(".")) for name in above},
    }


def _numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(str(name).isdecimal() for name in value)
