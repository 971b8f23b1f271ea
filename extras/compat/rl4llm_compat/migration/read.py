"""Read a command or a file of verl."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl4llm.config import flatten
from rl4llm.core.errors import ConfigError
from rl4llm_compat.migration.shell import commands
from rl4llm_compat.migration.table import row_of

Values = dict[str, Any]
ENVIRONMENT = re.compile(r"\$\{(?=oc\.env:)")
PAIR = re.compile(r"[+~]*[A-Za-z_][\w.]*=")


def read(given: str) -> Values:
    """Return the keys of verl in a YAML file, a script or a command; raise ConfigError if it has none."""
    path = Path(given).expanduser()
    # not `is_file`, which raises for the length of a command
    if "\n" in given or (re.search(r"\s", given) and not os.path.isfile(path)):
        return _of_commands(given, "the command")
    if not path.is_file():
        raise ConfigError(
            f"The file {given} does not exist. Accepted: a YAML file, a script, or a quoted command."
        )
    if path.suffix not in (".yaml", ".yml", ".json"):
        try:
            return _of_commands(path.read_text(encoding="utf-8"), str(path))
        except UnicodeError as error:
            raise ConfigError(f"{path} is not UTF-8. Accepted: a YAML file or a script.") from error
    values = _of_yaml(path)
    if not any(row_of(name) for name in values):
        raise ConfigError(f"{path} has no key of verl.")
    return values


def _of_yaml(path: Path) -> Values:
    try:
        layer = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(layer, DictConfig):
        raise ConfigError(f"{path} must be a mapping of keys.")
    written = OmegaConf.to_container(layer)
    try:
        values = flatten(OmegaConf.to_container(OmegaConf.create(_escaped(written)), resolve=True))
    except OmegaConfBaseException:  # it refers to what only the other project knows
        values = flatten(written)
    # classes, of Hydra
    return {name: value for name, value in values.items() if not name.endswith("_target_")}


def _escaped(values: Any) -> Any:
    """Return values in which references to the environment, which may hold secrets, resolve to their own text."""
    if isinstance(values, Mapping):
        return {name: _escaped(value) for name, value in values.items()}
    if isinstance(values, list):
        return [_escaped(value) for value in values]
    return ENVIRONMENT.sub(r"\\${", values) if isinstance(values, str) else values


def _of_commands(text: str, where: str) -> Values:
    """Return the keys of the first command that trains."""
    for words in commands(text):
        if any(re.search(r"^verl\.|/main_ppo\.py$", word) for word in words):
            return _of_pairs([word.lstrip("+~") for word in words if PAIR.match(word)])
    raise ConfigError(
        f"{where} contains no command of verl, such as python3 -m verl.trainer.main_ppo key=value."
    )


def _of_pairs(pairs: Sequence[str]) -> Values:
    found: Values = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            layer = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
            assert isinstance(layer, Mapping)
            found[name] = layer["value"]
        except (yaml.YAMLError, OmegaConfBaseException):
            found[name] = text
    return found
