"""Read a command or a file of another project: its keys, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl4llm.config import flatten
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.migration.original import ORIGINAL
from rl4llm.extensions.migration.projects import PROJECTS, of_trl, trl
from rl4llm.extensions.migration.row import Project
from rl4llm.extensions.migration.shell import commands
from rl4llm.extensions.migration.verl import VERL

Values = dict[str, Any]
FILES = ("config", "config_file")
ENVIRONMENT = re.compile(r"\$\{(?=oc\.env:)")
TRAINERS = {
    "grpo": "grpo",
    "rloo": "rloo",
    "dpo": "dpo",
    "kto": "kto",
    "sft": "sft",
    "reward": "reward_model",
}


@dataclass(frozen=True, slots=True)
class Source:
    """The keys of a command or a file, and the project that they belong to."""

    project: Project
    values: Values


def read(given: str) -> Source:
    """Read a path of a YAML file or a script, or a command; raise ConfigError if it belongs to no known project."""
    path = Path(given).expanduser()
    if not _is_path(given):
        return _of_commands(given, "the command")
    if not path.is_file():
        raise ConfigError(
            f"The file {given} does not exist. Accepted: a YAML file, a script, or a quoted command."
        )
    if path.suffix in (".yaml", ".yml", ".json"):
        values = _of_yaml(path)
        return Source(_whose(values, str(path)), values)
    return _of_commands(path.read_text(encoding="utf-8"), str(path))


def _is_path(given: str) -> bool:
    return "\n" not in given and (Path(given).expanduser().is_file() or not re.search(r"\s", given))


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
    return {
        name: value for name, value in values.items() if not name.endswith("_target_")
    }  # classes, of Hydra


def _escaped(values: Any) -> Any:
    """Return values in which references to the environment, which may hold secrets, resolve to their own text."""
    if isinstance(values, Mapping):
        return {name: _escaped(value) for name, value in values.items()}
    if isinstance(values, list):
        return [_escaped(value) for value in values]
    return ENVIRONMENT.sub(r"\\${", values) if isinstance(values, str) else values


def _of_commands(text: str, where: str) -> Source:
    """Return the keys of the first command that trains."""
    for words in commands(text):
        for mark, project in MARKS:
            if any(re.search(mark, word) for word in words):
                return _of_words(words, project)
    known = "verl.trainer.main_ppo, trl grpo, scripts/run_train_grpo.py"
    raise ConfigError(f"{where} contains no command of a project that is known here, such as {known}.")


MARKS: tuple[tuple[str, Project | None], ...] = (
    (r"^verl\.|/main_ppo\.py$", VERL),
    (r"run_train_\w+(\.py)?$", ORIGINAL),
    (r"^trl$|(^|/)(grpo|rloo|dpo|kto|sft|reward)\w*\.py$", None),
)
"""What a word of a command looks like, by project; TRL's names depend on the trainer."""


def _of_words(words: Sequence[str], project: Project | None) -> Source:
    if project is VERL:
        pairs = [word.lstrip("+~") for word in words if re.match(r"[+~]*[A-Za-z_][\w.]*=", word)]
        return Source(VERL, _of_pairs(pairs))
    flags = _flags(words)
    values: Values = {}
    for name in FILES:
        if file := flags.pop(name, None):
            values = _of_yaml(Path(OmegaConf.create({"file": str(file)}).file).expanduser())
    if project is ORIGINAL:
        flags.pop("local_rank", None)
        gpus = flags.pop("num_gpus", 1)
        own: Values = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
        own |= {"launch.nproc": gpus} if gpus != 1 else {}
        return Source(ORIGINAL, _method_of(words, values) | own)
    trainer = next(
        (name for word in words for name in TRAINERS if re.match(rf"(.*/)?{name}\w*(\.py)?$", word)), "grpo"
    )
    return Source(trl(TRAINERS[trainer]), values | flags)


def _method_of(words: Sequence[str], values: Values) -> Values:
    """Return the values with the method of the script, in case the file has no section of a method."""
    script = next(word for word in words if "run_train_" in word)
    name = re.sub(r".*run_train_(\w+?)(_dist)?(\.py)?$", r"\1", script)
    return values if "method.name" in ORIGINAL.prepare(values) else {f"{name}.max_steps": 100} | values


def _flags(words: Sequence[str]) -> Values:
    """Return ``--name value``, ``--name=value`` and ``--name`` by name, with underscores."""
    found: Values = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = _value(value) if equals else True
            name = "" if equals else name
        elif name:
            found[name] = _value(word)
            name = ""
    return found


def _value(text: str) -> Any:
    return _of_pairs([f"value={text}"])["value"]


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


def _whose(values: Values, where: str) -> Project:
    """Return the project that has most of the keys."""
    trainer = "grpo" if {"num_generations", "max_completion_length"} & set(values) else "sft"
    trainer = "dpo" if {"label_smoothing", "precompute_ref_log_probs"} & set(values) else trainer
    candidates = [*PROJECTS, *of_trl(trainer)]

    def known(project: Project) -> int:
        return sum(project.row(name) is not None for name in project.prepare(values))

    best = max(candidates, key=known)
    if not known(best):
        names = ", ".join(dict.fromkeys(project.name for project in candidates))
        raise ConfigError(f"{where} has no key of a project that is known here: {names}.")
    return best
