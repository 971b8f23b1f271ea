"""The configuration: typed dataclasses, filled from a YAML file and ``key.sub=value`` overrides.

Options of an algorithm, environment, reward, engine or backend are next to its `name`. They are checked against the class
of that name, see `rl4llm.compose`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from rl4llm.config.keys import FREE, PART_KEYS, Config, LaunchConfig, TrackingConfig
from rl4llm.config.overrides import annotation, layer_of, read_yaml, whole_lists
from rl4llm.config.references import expand_paths, hide_unset, references_in, variables, written
from rl4llm.core.errors import ConfigError, did_you_mean, unknown
from rl4llm.core.registry import elsewhere
from rl4llm.core.schema import check_fields, hint_in, is_text, means_null, refusal, takes

__all__ = [
    "CONFIGS", "Config", "LaunchConfig", "TrackingConfig", "annotation_of", "as_written", "by_part", "flatten",
    "load_config", "to_yaml", "variables_of",
]  # fmt: skip
CONFIGS = Path(__file__).parents[1] / "configs"
"""The bundled configurations: a link to configs/ in a checkout, a copy in a wheel."""


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = (), *, of_run: bool = False
) -> Config:
    """Read a YAML file, apply overrides, and check every key and type; raise ConfigError.

    `of_run` accepts unset environment variables in the config.yaml of a run, and hides their values.

    Overrides are a mapping or strings: ``key.sub=value``, or further YAML files that are merged over the first. If a name
    such as ``configs/quickstart.yaml`` does not exist, the bundled file is used.

    >>> load_config(overrides=["model.path=m", "data.path=d", "training.lr=1e-4"]).training.lr
    0.0001
    """
    files = [Path(path)] if path is not None else []
    if not isinstance(overrides, Mapping):
        files += [Path(text) for text in overrides if _is_file(text)]
        overrides = [text for text in overrides if not _is_file(text)]
    merged, keys = _defaults(), set[str]()
    for file in files:
        try:
            layer = _read(file)
            merged = _merge(merged, layer)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
        keys |= flatten(layer).keys()
    layer = layer_of(overrides, Config)
    merged = _merge(merged, layer)
    expand_paths(merged)
    if of_run:
        hide_unset(merged)
    config = _checked(merged)
    config.given = frozenset(keys | flatten(layer).keys())
    return config


@functools.cache
def _defaults() -> DictConfig:
    """Return the layer under all others, which a merge copies."""
    return OmegaConf.structured(Config)


def by_part(config: Config) -> dict[str, Config]:
    """Return the configuration of each environment of a run: the only one is named "", or there is one for each of `parts`.

    A part has a weight, and keys of `PART_KEYS`, which are merged over those of the run:

        parts:
          sums: {weight: 2, data: {path: arithmetic}, rewards: [{name: math, extract: answer}]}
          tools: {data: {path: arithmetic}, env: {name: tool}, rollout: {max_tokens: 128}}
    """
    if not config.parts:
        return {"": config}
    whole = OmegaConf.structured(dataclasses.replace(config, parts={}, curriculum=None))
    return {name: _part(name, part, whole) for name, part in config.parts.items()}


def _part(name: str, part: Any, whole: DictConfig) -> Config:
    if not isinstance(part, Mapping):
        raise ConfigError(refusal(f"parts.{name}", part, dict))
    try:
        for key in flatten(part):
            if not f"{key}.".startswith(tuple(f"{name}." for name in ("weight", *PART_KEYS))):
                section = key.partition(".")[0]
                inside = any(name.startswith(f"{section}.") for name in PART_KEYS)
                raise ConfigError(unknown("the key", key if inside else section, ("weight", *PART_KEYS)))
        return _checked(_merge(whole, {key: value for key, value in part.items() if key != "weight"}))
    except ConfigError as error:
        raise ConfigError(f"parts.{name}: {error}") from None


def to_yaml(config: Config, *, elsewhere: bool = False) -> str:
    """Return the result of `as_written` as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(as_written(config, elsewhere=elsewhere)))


def as_written(config: Config, *, elsewhere: bool = False) -> dict[str, Any]:
    """Return the configuration in a form for other readers: without secrets, and with ``${oc.env:NAME}`` unresolved.

    For processes `elsewhere`, only secret references stay unresolved.
    """
    return written(_container(config), config.references, elsewhere=elsewhere)


def variables_of(config: Config) -> dict[str, bool]:
    """Return the environment variables that the configuration reads, and whether each contains a secret."""
    return variables(_container(config), config.references) if config.references else {}


def _container(config: Config) -> dict[str, Any]:
    """Return a copy of a configuration as dicts and lists, without what is no key."""
    values = dataclasses.asdict(config)
    return {item.name: values[item.name] for item in dataclasses.fields(config) if not item.metadata}


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return every leaf by its dotted key."""
    if isinstance(config, Config):
        config = _container(config)
    if not isinstance(config, Mapping):
        return {prefix[:-1]: config}
    return {key: value for name in config for key, value in flatten(config[name], f"{prefix}{name}.").items()}


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file or, for a missing name such as configs/quickstart.yaml, of the bundled one."""
    bundled = CONFIGS.parent / path
    is_bundled = path.parts[:1] == (CONFIGS.name,) and bundled.is_file() and not path.is_file()
    try:
        layer = read_yaml((bundled if is_bundled else path).read_text(encoding="utf-8"), Config)
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(layer, dict):
        raise ConfigError(f"the content {layer!r:.40} is not a mapping of keys, such as max_steps: 100.")
    return layer


def _is_file(text: str) -> bool:
    return "=" not in text and text.endswith((".yaml", ".yml"))


def _checked(merged: DictConfig) -> Config:
    """Return the configuration; raise ConfigError for a key that is not set, a broken reference or a wrong value."""
    if missing := sorted(OmegaConf.missing_keys(merged)):
        raise ConfigError(f"{missing[0]} is not set. Set it in the file, or with {missing[0]}=...")
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(config, Config)  # it is what everything was merged into
    config.references = references_in(merged)
    if not config.output.dir:
        raise ConfigError("output.dir is empty. Set it to the directory of the run.")
    config.output.dir = str(Path(config.output.dir))
    check_fields(config)
    for section in FREE:
        if not isinstance(getattr(config, section).get("name"), str):
            raise ConfigError(f"{section}.name is not set; `rl4llm info` lists the accepted names.")
    if isinstance(config.curriculum, str) and config.parts:
        raise ConfigError(
            f"curriculum={config.curriculum!r} is not accepted with `parts`. Set the least share of its weight that a part "
            "keeps, such as 0.1."
        )
    by_part(config)
    return config


def _merge(config: DictConfig, changes: dict[str, Any]) -> DictConfig:
    values: Any = OmegaConf.to_container(config)
    changes = whole_lists(values, changes)
    for name, value in changes.items():
        hint = dict if isinstance(values.get(name), Mapping) else annotation_of(name)
        if isinstance(value, Mapping) != (hint is dict) and (hint is dict or takes(hint, list)):
            raise ConfigError(refusal(name, value, hint))
    leaves = flatten(changes)
    _check_keys(leaves, config)
    _check_texts(leaves)
    try:
        layer = OmegaConf.create(changes)
        merged = _merged(config, layer)
    except ValidationError as error:
        key = re.sub(r"\[\d+\]$", "", str(error.full_key))  # of a list, not of one of its items
        raise ConfigError(refusal(key, leaves[key], annotation_of(key))) from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    for section in FREE:  # another name has other options, so earlier ones are dropped
        named = changes[section].get("name") if changes.get(section) is not None else None
        if named not in (None, config[section].get("name")):
            merged[section] = layer[section]
    return merged


def _merged(config: DictConfig, layer: DictConfig) -> DictConfig:
    """Return a layer merged over others; its ``???``, which OmegaConf drops, are keys that a later layer must set."""
    merged = OmegaConf.merge(config, layer)
    assert isinstance(merged, DictConfig)
    for key in OmegaConf.missing_keys(layer):
        OmegaConf.update(merged, key, MISSING)
    return merged


def _check_texts(leaves: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value of Python in a key for text that is not one, and for a text where null was meant."""
    for key, value in leaves.items():
        hint = annotation_of(key)
        kind = hint_in(hint, "0") if isinstance(value, list) else hint
        items = value if isinstance(value, list) else [value]
        if means_null(value, hint) or (
            is_text(kind) and not all(isinstance(item, str | Path | None) for item in items)
        ):
            raise ConfigError(refusal(key, value, hint))


def annotation_of(key: str) -> Any:
    """Return the annotation of a dotted key of `Config`; Any for the options of a name."""
    return annotation(Config, key.split("."))


def _check_keys(leaves: Mapping[str, Any], config: DictConfig) -> None:
    free = (*FREE, "rewards", "parts")
    names = [key for key in flatten(OmegaConf.to_container(config)) if key.split(".")[0] not in free]
    for key in leaves:
        if any(name.startswith(f"{key}.") for name in names):
            raise ConfigError(refusal(key, leaves[key], dict))
        section, _, leaf = key.rpartition(".")
        if key.split(".")[0] in free or key in names:
            continue
        if answer := elsewhere("key", key):
            raise ConfigError(f"Unknown configuration key: {answer}")
        inside = [name for name in names if section and name.startswith(f"{section}.")]
        same = [name for name in names if name.rpartition(".")[2] == leaf]
        inner = [name.removeprefix(f"{section}.") for name in inside]
        near = (
            did_you_mean(leaf, inner).replace("'", f"'{section}.", 1) if inside else did_you_mean(key, names)
        )
        near = f" Did you mean {same[0]!r}?" if same else near
        listed = inside or dict.fromkeys(name.split(".")[0] for name in [*names, *free])
        raise ConfigError(f"Unknown configuration key {key!r}.{near} Known: {', '.join(listed)}.")
