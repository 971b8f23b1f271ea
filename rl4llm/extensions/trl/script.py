"""Turn a script's arguments into configuration keys, by the table."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl4llm.backends.models import load_tokenizer
from rl4llm.compose import Given
from rl4llm.config import flatten
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.trl import rewards, rows
from rl4llm.extensions.trl.alias import Alias, Keys
from rl4llm.extensions.trl.arguments import TRLConfig
from rl4llm.extensions.trl.joint import JOINTS, OF_EPISODES, TrainingFacts
from rl4llm.extensions.trl.table import CONSTRUCTOR, EPISODES, TABLES

OURS = ("max_steps", "seed")
"""Names with two meanings: as a keyword of a trainer they are rl4llm's, in a config object they are TRL's."""


class Script:
    """The TRL names in the arguments of a trainer; it removes them from `arguments`.

    Raises ConfigError for names without a counterpart, for an `args` object of another trainer, and for a name that
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
            raise ConfigError(
                f"{twice[0]} is set twice, in args and as an argument of the trainer. Remove one of them."
            )
        self.given |= of_args

    def keys(self, dataset: Any, own: Mapping[str, Any]) -> Keys:
        """Return the configuration keys of the script, except those that `own`, rl4llm's keywords, override.

        Raises ConfigError if a name of the script and a key of rl4llm set the same.
        """
        facts = TrainingFacts(
            rows.count(self._one_of("train_dataset", "dataset", dataset)),
            int(os.environ.get("WORLD_SIZE", "1")),
        )
        ours = set(_leaves(own))
        keys: Keys = {}
        for names, found in self._found(facts):
            set_names = [name for name in names if name in self.given]
            for key in found:
                if set_names and key in ours:
                    raise ConfigError(
                        f"{' and '.join(set_names)} becomes {key}, which is also set. Set only one of them."
                    )
            keys |= {key: value for key, value in found.items() if key not in ours}
        self._warn()
        return keys

    def objects(self, given: Given) -> Given:
        """Return the objects given under rl4llm's and TRL's names. Raises ConfigError if one is given under both."""
        dataset = self._one_of("train_dataset", "dataset", given.dataset)
        tokenizer = self._one_of("processing_class", "tokenizer", given.tokenizer)
        plain = "train_dataset" in self.given and rows.is_plain(dataset)
        given = replace(given, dataset=dataset, tokenizer=tokenizer)
        if self.given.get("reward_funcs") is not None:
            self._one_of("reward_funcs", "reward_functions", given.reward_functions)
            made, total = rewards.reward_functions(self.given["reward_funcs"], self._weights(), plain=plain)
            given = replace(
                given, reward_functions=made, reward_transform_fn=given.reward_transform_fn or total
            )
        elif self._weights() is not None:
            raise ConfigError(
                "reward_weights needs reward_funcs. Next: set reward_funcs, or remove reward_weights."
            )
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
        """Refuse to train on prompts, which TRL does by default with conversations."""
        if self.given.get("completion_only_loss") is False:
            raise ConfigError(
                "completion_only_loss=False has no counterpart: rl4llm does not train on prompts. Remove it."
            )
        if rows.is_of_conversations(dataset) and not self.given.get("assistant_only_loss"):
            warnings.warn(
                "Only assistant turns are trained on, as with assistant_only_loss=True. Set it to silence this warning.",
                stacklevel=4,
            )

    def _weights(self) -> Any:
        return self.given.get("reward_weights")

    def _one_of(self, name: str, own_name: str, own: Any) -> Any:
        """Return the object given under TRL's name or under rl4llm's. Raises ConfigError for both."""
        if self.given.get(name) is None:
            return own
        if own is not None:
            raise ConfigError(f"{name} and {own_name} have the same meaning. Set only one of them.")
        return self.given[name]

    def _found(self, facts: TrainingFacts) -> Iterator[tuple[tuple[str, ...], Keys]]:
        """Yield keys, with the names that they come from."""
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
            raise ConfigError(
                f"args={args!r:.60} is not accepted. Accepted: {known}, imported from rl4llm instead of trl."
            )
        if args is not None and args.algorithm != self.algorithm:
            raise ConfigError(
                f"args={args!r:.60} belongs to another trainer: the algorithm of this one is {self.algorithm!r}."
            )
        return args

    @staticmethod
    def _check(name: str, value: Any, alias: Alias) -> None:
        if alias.kind == "refused" and not _same(value, alias.default):
            raise ConfigError(f"{name}={value!r:.60} has no counterpart in rl4llm. Instead: {alias.says}.")

    def _warn(self) -> None:
        ignored = []
        for name, value in self.given.items():
            alias = self._table[name]
            if alias.kind == "inert" and not _same(value, alias.default):
                ignored.append(f"{name} ({alias.says})")
        if ignored:
            warnings.warn(f"Ignored (no effect in rl4llm): {'; '.join(ignored)}.", stacklevel=4)


def _same(value: Any, default: Any) -> bool:
    if default is None and isinstance(value, list | tuple | Mapping | str | bool):
        return not value
    return type(value) in (type(default), int, float) and value == default


def _leaves(own: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted keys of overrides, which may be nested."""
    for name, value in own.items():
        yield from (
            (f"{name}.{leaf}" for leaf in flatten(value)) if isinstance(value, Mapping) and value else (name,)
        )
