"""From a script's arguments to configuration keys, by the table."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl4llm.backends.models import load_tokenizer
from rl4llm.build import Given
from rl4llm.config import flatten
from rl4llm.core.errors import ConfigError
from rl4llm.trl import rewards, rows
from rl4llm.trl.alias import Alias, Keys
from rl4llm.trl.arguments import TRLConfig
from rl4llm.trl.joint import JOINTS, OF_EPISODES, Facts
from rl4llm.trl.table import CONSTRUCTOR, EPISODES, TABLES

OURS = ("max_steps", "seed")
"""Names that keywords of a trainer have in common with TRL; they are ours there, and TRL's in a config object."""


class Script:
    """What of the arguments of a trainer is TRL's; takes it out of `arguments`.

    Raises ConfigError for names that cannot be said here, for an object of another trainer as `args`, and for a name that
    both the object and the keywords give.
    """

    def __init__(self, algorithm: str, arguments: dict[str, Any]):
        self.algorithm = algorithm
        self.args: TRLConfig | None = self._checked(arguments.pop("args", None))
        self._names = TABLES.get(algorithm, EPISODES)
        self._table = self._names | CONSTRUCTOR
        named = [name for name in arguments if name in self._table and name not in OURS]
        self.given: dict[str, Any] = {name: arguments.pop(name) for name in named}
        of_args = {name: getattr(self.args, name) for name in self.args.given} if self.args else {}
        twice = sorted(self.given.keys() & of_args.keys())
        if twice:
            raise ConfigError(f"{twice[0]} is given twice, in args and as an argument of the trainer. Leave one out.")
        self.given |= of_args

    def keys(self, dataset: Any, own: Mapping[str, Any]) -> Keys:
        """The configuration keys of the script, without those that `own`, which are ours, says otherwise.

        Raises ConfigError where a name of the script and a key of ours say the same.
        """
        facts = Facts(rows.count(self._one_of("train_dataset", "dataset", dataset)), int(os.environ.get("WORLD_SIZE", "1")))
        ours = set(_leaves(own))
        keys: Keys = {}
        for names, found in self._found(facts):
            said = [name for name in names if name in self.given]
            for key in found:
                if said and key in ours:
                    raise ConfigError(f"{' and '.join(said)} becomes {key}, which is given too. Give one of them.")
            keys |= {key: value for key, value in found.items() if key not in ours}
        self._warn()
        return keys

    def objects(self, given: Given) -> Given:
        """What is given under our names and TRL's, as our builder takes it; raises ConfigError for both of one thing."""
        dataset = self._one_of("train_dataset", "dataset", given.dataset)
        tokenizer = self._one_of("processing_class", "tokenizer", given.tokenizer)
        plain = "train_dataset" in self.given and rows.is_plain(dataset)
        given = replace(given, dataset=dataset, tokenizer=tokenizer)
        if self.given.get("reward_funcs") is not None:
            self._one_of("reward_funcs", "reward_functions", given.reward_functions)
            made, total = rewards.reward_functions(self.given["reward_funcs"], self._weights(), plain=plain)
            given = replace(given, reward_functions=made, reward_transform_fn=given.reward_transform_fn or total)
        elif self._weights() is not None:
            raise ConfigError("reward_weights are those of reward_funcs, of which there are none.")
        if "train_dataset" not in self.given:
            return given
        if self.algorithm == "sft":
            self._check_learned(dataset)
        read = rows.READERS.get(self.algorithm, rows.as_they_are)
        given = replace(given, dataset=read(dataset, plain), eval_dataset=read(given.eval_dataset, plain))
        if tokenizer is None and (plain or not isinstance(given.model, str | Path)):
            tokenizer = load_tokenizer(rows.source(given.model), self.given.get("pad_token"))
        return replace(given, tokenizer=rows.plain_text(tokenizer) if plain else tokenizer)

    def _check_learned(self, dataset: Any) -> None:
        """Prompts are not learned here, which TRL does with conversations unless it is told not to."""
        if self.given.get("completion_only_loss") is False:
            raise ConfigError("completion_only_loss=False has no counterpart here: prompts are not learned. Leave it out.")
        if rows.is_of_conversations(dataset) and not self.given.get("assistant_only_loss"):
            warnings.warn(
                "Only what the assistant says is learned here, as with TRL's assistant_only_loss=True. Set that to say so.",
                stacklevel=4,
            )

    def _weights(self) -> Any:
        return self.given.get("reward_weights")

    def _one_of(self, name: str, own_name: str, own: Any) -> Any:
        """What is given under TRL's name or under ours; raises ConfigError for both."""
        if self.given.get(name) is None:
            return own
        if own is not None:
            raise ConfigError(f"{name} and {own_name} are two names of the same. Give one of them.")
        return self.given[name]

    def _found(self, facts: Facts) -> Iterator[tuple[tuple[str, ...], Keys]]:
        """Keys, and the names that they come from."""
        defaults = {name: alias.default for name, alias in self._names.items()}
        for name, value in ((defaults if self.args else {}) | self.given).items():
            self._check(name, value, self._table[name])
            yield (name,), self._table[name].keys(value)
        for joint in JOINTS.get(self.algorithm, OF_EPISODES):
            if self.args or any(name in self.given for name in joint.names):
                yield joint.names, joint.keys(defaults | self.given, facts)

    def _checked(self, args: Any) -> TRLConfig | None:
        if args is not None and not isinstance(args, TRLConfig):
            known = ", ".join(cls.__name__ for cls in TRLConfig.__subclasses__())
            raise ConfigError(f"args={args!r:.60} is not accepted: one of {known}, imported from rl4llm instead of trl.")
        if args is not None and args.algorithm != self.algorithm:
            raise ConfigError(f"args={args!r:.60} is of another trainer: here the algorithm is {self.algorithm!r}.")
        return args

    @staticmethod
    def _check(name: str, value: Any, alias: Alias) -> None:
        if alias.kind == "refused" and not _same(value, alias.default):
            raise ConfigError(f"{name}={value!r:.60} has no counterpart here. Instead: {alias.says}.")

    def _warn(self) -> None:
        silent = [name for name, value in self.given.items() if self._means_nothing(name, value)]
        if silent:
            said = "; ".join(f"{name} ({self._table[name].says})" for name in silent)
            warnings.warn(f"Without meaning here: {said}.", stacklevel=4)

    def _means_nothing(self, name: str, value: Any) -> bool:
        alias = self._table[name]
        return alias.kind == "inert" and not _same(value, alias.default)


def _same(value: Any, default: Any) -> bool:
    if default is None and isinstance(value, list | tuple | Mapping | str | bool):
        return not value
    return type(value) in (type(default), int, float) and value == default


def _leaves(own: Mapping[str, Any]) -> Iterator[str]:
    """The dotted keys of overrides, which may be nested."""
    for name, value in own.items():
        yield from (f"{name}.{leaf}" for leaf in flatten(value)) if isinstance(value, Mapping) and value else (name,)
