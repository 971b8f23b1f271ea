"""The configuration: typed dataclasses, filled from a YAML file and ``key.sub=value`` overrides.

Options of an algorithm, environment, reward, engine or backend are next to its `name`. They are checked against the class
of that name, see `rl4llm.compose`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl4llm.config.keys import FREE, Config, TrackingConfig
from rl4llm.config.overrides import layer_of, read_yaml
from rl4llm.config.resolve import flatten, merged
from rl4llm.core.errors import ConfigError

__all__ = ["CONFIGS", "Config", "TrackingConfig", "flatten", "load_config"]

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
    values, keys = Config().values(), set[str]()
    for file in files:
        try:
            layer = layer_of(_read(file), Config)
            values = merged(values, layer, FREE)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
        keys |= flatten(layer).keys()
    layer = layer_of(overrides, Config)
    values = merged(values, layer, FREE)
    return Config.of(values, frozenset(keys | flatten(layer).keys()), of_run=of_run)


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
