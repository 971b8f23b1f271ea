"""A recipe: a directory with `recipe.yaml`, the configurations of its stages, and its stored results."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl4llm.config import CONFIGS, Config, load_config
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.schema import check_options

RECIPES = CONFIGS / "recipes"
TRAIN = (
    "train {recipe}/train.yaml model.path={model} data.path={data} seed={seed} output.dir={run} {overrides}"
)
FILLED = ("model.path", "data.path")
"""Keys that stages contain as {model} and {data}; an override of them replaces those words."""


@dataclass(frozen=True)
class Recipe:
    """What `recipe.yaml` contains, and the directory that it is in.

    Each stage is a command line of `rl4llm`, or one that begins with `python`. These words are filled in:

    - {recipe}: the directory of the recipe
    - {work}: the directory of this repetition
    - {run}: the run that is measured, {work}/run
    - {model}, {data}: `model.path` and `data.path` of train.yaml, or of the command line
    - {seed}: the seed
    - {overrides}: the overrides of the variant, then those of the command line
    """

    path: Path
    title: str
    learns: str
    data: str = ""  # a stage before the others if {data} does not exist, of which {place} is the later path
    stages: tuple[str, ...] = (TRAIN,)
    variants: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"default": ()})
    seeds: tuple[int, ...] = (0,)
    metric: str = "accuracy"  # a share, from 0 to 1
    measured: tuple[str, ...] = ("{run}/eval.jsonl",)  # or files that `rl4llm eval --out` writes, in order
    needs: str = ""
    expected: tuple[Mapping[str, Any], ...] = ()  # what others publish: variant, before, after, source
    plan: Mapping[str, str] = field(default_factory=dict)  # what `rl4llm plan` finds, by variant

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def takes_model(self) -> bool:
        """Return whether a stage begins with the model that `model.path` names."""
        return any("{model}" in stage for stage in self.stages)

    def config(self, overrides: Sequence[str]) -> Config:
        """Return train.yaml as a configuration."""
        return load_config(self.path / "train.yaml", overrides)

    def overrides(self, variant: str) -> list[str]:
        """Return the overrides of a variant; raise ConfigError for an unknown one."""
        if variant not in self.variants:
            raise ConfigError(unknown(f"recipe {self.name}: --variant", variant, self.variants))
        return list(self.variants[variant])

    def words(self, work: Path, variant: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the words of a repetition that stages contain in braces."""
        overrides = [*self.overrides(variant), *overrides]
        config = self.config([text for text in overrides if text.partition("=")[0] in FILLED])
        return {
            "recipe": str(self.path),
            "work": str(work),
            "run": str(work / "run"),
            "seed": str(seed),
            "model": config.model.path,
            "data": "null" if config.data.path is None else config.data.path,
            "overrides": changes(overrides),
        }

    def fingerprint(self, variant: str) -> str:
        """Return a hash of what determines the results: stages, overrides, configurations and scripts of the recipe."""
        files = sorted(file for file in self.path.iterdir() if file.suffix in (".yaml", ".py"))
        parts: dict[str, Any] = {"stages": [self.data, *self.stages], "overrides": self.overrides(variant)}
        parts |= {file.name: _content(file) for file in files if file.name != "recipe.yaml"}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def command(stage: str, words: Mapping[str, Any]) -> list[str]:
    arguments: list[str] = []
    for word in shlex.split(stage):
        arguments += words["overrides"] if word == "{overrides}" else [filled(word, words)]
    if arguments[0] == "python":
        return [sys.executable, *arguments[1:]]
    return [sys.executable, "-m", "rl4llm", *arguments]


def filled(text: str, words: Mapping[str, Any]) -> str:
    """Return a text with the words in place of their names in braces."""
    for name, value in words.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def changes(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that change a run, without those that say where model and data are."""
    return [text for text in overrides if text.partition("=")[0] not in FILLED]


def names() -> list[str]:
    """Return the names of the bundled recipes."""
    return sorted(file.parent.name for file in RECIPES.glob("*/recipe.yaml"))


def load(name: str) -> Recipe:
    """Read a bundled recipe, or one of a directory; raise ConfigError for an unknown name or key."""
    path = Path(name) if (Path(name) / "recipe.yaml").is_file() else RECIPES / name
    file = path / "recipe.yaml"
    if not file.is_file():
        raise ConfigError(unknown("recipe", name, names()))
    values: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    check_options(str(file), Recipe, values, ("path",), ())
    lists: Any = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return Recipe(path, **values | lists)


def _content(file: Path) -> Any:
    text = file.read_text(encoding="utf-8")
    return yaml.safe_load(text) if file.suffix == ".yaml" else text
