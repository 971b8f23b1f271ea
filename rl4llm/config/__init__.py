"""The configuration: typed dataclasses, filled from a YAML file and ``key.sub=value`` overrides.

Options of an algorithm, environment, reward, engine or backend are next to its `name`. They are checked against the class
of that name, see `rl4llm.compose`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException, ValidationError

from rl4llm.config.keys import FREE, PART_KEYS, Config, LaunchConfig, TrackingConfig
from rl4llm.config.overrides import annotation, layer_of, read_yaml, whole_lists
from rl4llm.config.references import expand_paths, hide_unset, references_in, variables, written
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.registry import elsewhere
from rl4llm.core.schema import check_fields, hint_in, hints_of, is_text, means_null, refusal, takes

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
            raise ConfigError(error if str(file) in str(error) else f"{file}: {error}") from None
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
    where = f"parts.{name}"
    if not re.fullmatch(r"[a-zA-Z0-9_\-]+", str(name)):
        raise ConfigError(
            f"{where}: the name {name!r} is not accepted. Accepted: letters, digits, '_' and '-'."
        )
    if not isinstance(part, Mapping):
        raise ConfigError(
            f"{where}={part!r} is not accepted. Accepted: a mapping with weight and any of {', '.join(PART_KEYS)}."
        )
    keys = {key: value for key, value in part.items() if key != "weight"}
    for section, value in keys.items():
        if section not in PART_KEYS:
            raise ConfigError(unknown(f"{where}: the key", str(section), ("weight", *PART_KEYS)))
        accepted = PART_KEYS[section]
        for key in value if accepted and isinstance(value, Mapping) else ():
            if key not in accepted:
                raise ConfigError(
                    f"{unknown(f'{where}.{section}: the key', str(key), accepted)} Other keys are set once for all parts."
                )
    try:
        return _checked(_merge(whole, keys))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


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
    values = _in_containers(config)
    assert isinstance(values, dict)  # as a dataclass is
    return values


def _in_containers(value: Any) -> Any:
    """Return a copy of a configuration's dataclasses, mappings and lists as dicts and lists."""
    if dataclasses.is_dataclass(value):
        value = {
            item.name: getattr(value, item.name) for item in dataclasses.fields(value) if not item.metadata
        }
    if isinstance(value, Mapping):
        return {name: _in_containers(item) for name, item in value.items()}
    return [_in_containers(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(layer: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(layer)
    assert isinstance(values, dict)  # as the layers are
    return {str(name): value for name, value in values.items()}


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return every leaf by its dotted key."""
    if dataclasses.is_dataclass(config):
        config = {
            item.name: getattr(config, item.name) for item in dataclasses.fields(config) if not item.metadata
        }
    if not isinstance(config, Mapping):
        return {prefix[:-1]: config}
    return {key: value for name in config for key, value in flatten(config[name], f"{prefix}{name}.").items()}


def _read(path: Path) -> dict[str, Any]:
    path = _found(path)
    try:
        layer = read_yaml(path.read_text(encoding="utf-8"), Config)
    except Exception as error:
        escape = "unknown escape" in str(error)
        hint = " In double quotes a backslash begins an escape: use single quotes." if escape else ""
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.{hint}") from error
    if not isinstance(layer, dict):
        kind = "a list" if isinstance(layer, list) else f"{layer!r:.40}"
        raise ConfigError(
            f"{path} must be a mapping of keys, not {kind}. Accepted: lines such as max_steps: 100."
        )
    return layer


def _found(path: Path) -> Path:
    """Return the file or, for a missing name such as configs/quickstart.yaml, the bundled one."""
    places = [path, CONFIGS.parent / path] if path.parts[:1] == (CONFIGS.name,) else [path]
    for place in places:
        if place.is_file():
            return place
    if path.is_dir():
        run = path / "config.yaml"
        file = f"{run}, the configuration of this run" if run.is_file() else "the path of a YAML file"
        raise ConfigError(f"{str(path)!r} is a directory, not a configuration file. Accepted: {file}.")
    if "=" in path.name:
        raise ConfigError(
            f"{str(path)!r} is a key, but the first argument is a configuration file. Write the file before the keys, as in "
            f"`rl4llm train configs/gsm8k_grpo.yaml {path}`."
        )
    names = {item.name for place in places for item in place.parent.glob("*.yaml") if item.is_file()}
    near = difflib.get_close_matches(path.name, sorted(names), n=1)
    accepted = " Accepted: the path of a YAML file, or configs/NAME.yaml for a bundled one."
    hint = f" Did you mean {path.parent / near[0]}?" if near else accepted
    raise ConfigError(f"There is no configuration file {path}.{hint}")


def _is_file(text: str) -> bool:
    return "=" not in text and text.endswith((".yaml", ".yml"))


def _checked(merged: DictConfig) -> Config:
    """Return the configuration; raise ConfigError for a key that is not set, a broken reference or a wrong value."""
    try:
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(
                f"{missing[0]} is not set. Set it in the YAML file or on the command line: {missing[0]}=..."
            )
        config = OmegaConf.to_object(merged)
    except InterpolationResolutionError as error:
        raise ConfigError(
            f"{error.full_key}: {str(error).splitlines()[0]}. Accepted in ${{...}}: another key, or oc.env:NAME with the "
            "name of an environment variable that is set."
        ) from None
    assert isinstance(config, Config)  # it is what everything was merged into
    config.references = references_in(merged)
    config.output.dir = str(Path(config.output.dir))
    check_fields(config)
    for part in FREE:
        if not isinstance(getattr(config, part).get("name"), str):
            raise ConfigError(f"{part}.name is not set; `rl4llm info` lists the accepted names.")
    if not isinstance(config.curriculum, str | None) and not config.parts:
        raise ConfigError(
            f"curriculum={config.curriculum} requires `parts`, whose weights it changes. Next step: name a column of the "
            "dataset, such as curriculum=level."
        )
    if isinstance(config.curriculum, str) and config.parts:
        raise ConfigError(
            f"curriculum={config.curriculum!r} is not accepted with `parts`. Accepted: the least share of its weight that a "
            "part keeps, such as 0.1, or null."
        )
    by_part(config)
    return config


def _merge(config: DictConfig, changes: dict[str, Any]) -> DictConfig:
    values = _plain(config)
    changes = whole_lists(values, changes)
    for name, value in changes.items():
        if isinstance(values.get(name), Mapping) and not isinstance(value, Mapping):
            raise ConfigError(
                f"{name!s}={value!r} is not accepted. Accepted: a mapping of keys.{_first_key(name, value)}"
            )
        if isinstance(value, Mapping) and takes(annotation_of(name), list):
            raise ConfigError(refusal(name, value, annotation_of(name)))
    _check_keys(flatten(changes), config)
    _check_text_keys(flatten(changes))
    try:
        layer = OmegaConf.create(changes)
        merged = _merged(config, layer)
    except ValidationError as error:
        key = re.sub(r"\[\d+\]$", "", str(error.full_key))  # of a list, not of one of its items
        raise ConfigError(refusal(key, flatten(changes)[key], annotation_of(key))) from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    for part in FREE:  # another name has other options, so earlier ones are dropped
        named = changes[part].get("name") if changes.get(part) is not None else None
        if named not in (None, config[part].get("name")):
            merged[part] = layer[part]
    return merged


def _merged(config: DictConfig, layer: DictConfig) -> DictConfig:
    """Return a layer merged over others; its ``???``, which OmegaConf drops, are keys that a later layer must set."""
    merged = OmegaConf.merge(config, layer)
    assert isinstance(merged, DictConfig)
    for key in OmegaConf.missing_keys(layer):
        OmegaConf.update(merged, key, MISSING)
    return merged


def _check_text_keys(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value of Python in a key for text that is not one, and for a text where null was meant."""
    for key, value in given.items():
        hint = annotation_of(key)
        if means_null(value, hint):
            raise ConfigError(refusal(key, value, hint))
        listed = isinstance(value, list)
        for item in value if listed else [value]:
            if is_text(hint_in(hint, "0") if listed else hint) and not isinstance(item, str | Path | None):
                raise ConfigError(refusal(key, value, hint))


def _first_key(section: str, value: Any) -> str:
    """Return a sentence with the key that was meant by a text in place of a section; "" if there is none."""
    key = "name" if section in FREE else next(iter(hints_of(annotation_of(section))), "")
    fitting = isinstance(value, str) and (section in FREE or is_text(annotation_of(f"{section}.{key}")))
    return f" Did you mean {section}.{key}={value}?" if fitting else ""


def annotation_of(key: str) -> Any:
    """Return the annotation of a dotted key of `Config`; Any for the options of a name."""
    return annotation(Config, key.split("."))


def _check_keys(given: Iterable[str], config: DictConfig) -> None:
    free = (*FREE, "rewards", "parts")
    known = [key for key in flatten(OmegaConf.to_container(config)) if key.split(".")[0] not in free]
    for key in given:
        sections = {name.split(".")[0] for name in known}
        if key.split(".")[0] in free or key in known or key in sections:
            continue
        if answer := elsewhere("key", key):
            raise ConfigError(f"Unknown configuration key: {answer}")
        close = _closest(key, known)
        hint = f" Did you mean {close!r}?" if close else ""
        section = key.split(".")[0]
        near = [name for name in known if name.split(".")[0] == section] or sorted(sections | set(free))
        raise ConfigError(f"Unknown configuration key {key!r}.{hint} Known: {', '.join(near)}.")


def _closest(key: str, known: Iterable[str]) -> str:
    """Return the known key that was probably meant; "" if none is close.

    Within a section the last parts are compared, so that the name of the section does not make all its keys look alike.
    """
    section, _, leaf = key.rpartition(".")

    def alike(one: str, other: str) -> float:
        return difflib.SequenceMatcher(None, one, other).ratio()

    def closeness(name: str) -> float:
        of, _, tail = name.rpartition(".")
        same = 0.0 if of == section else 0.15 * (1 - alike(of, section))
        flat = alike(key.replace(".", "_"), name.replace(".", "_")) if of != section else 0.0
        return max(alike(leaf, tail) - same, flat - 0.1)

    best = max(known, key=closeness)
    return best if closeness(best) >= 0.65 else ""
