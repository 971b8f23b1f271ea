"""Turn a script's arguments into configuration keys, by the table."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl4llm.backends.models import load_tokenizer
from rl4llm.compose import Given
from rl4llm.config import flatten
from rl4llm.core.errors import ConfigError
from rl4llm_compat.trl import environment, images, rewards, rows
from rl4llm_compat.trl.arguments import TRLConfig
from rl4llm_compat.trl.joint import JOINTS, TrainingFacts, steps
from rl4llm_compat.trl.table import CONSTRUCTOR, REFERENCE, TABLES, Alias, Keys

DEFAULTS = {cls.algorithm: cls for cls in TRLConfig.__subclasses__()}
"""By the trainer's algorithm: the config with TRL's defaults."""

OURS = ("max_steps", "seed")
"""Names with two meanings: as a keyword of a trainer they are rl4llm's, in a config object they are TRL's."""


class Script:
    """The TRL names in the arguments of a trainer; it removes them from `arguments`.

    A script without `args` that names `reward_funcs` or `train_dataset` gets TRL's defaults, unless `configured`: a file
    decides. Raises ConfigError for names without a counterpart, for an `args` object of another trainer, and for a name
    that both the object and the keywords give.
    """

    def __init__(self, algorithm: str, arguments: dict[str, Any], *, configured: bool = False):
        self.algorithm, self._configured = algorithm, configured
        self.args: TRLConfig | None = self._checked(arguments.pop("args", None))
        if arguments.get("environment_factory") and not {"train_dataset", "dataset"} & arguments.keys():
            arguments["train_dataset"] = environment.ROWS
        if (
            self.args is None
            and not configured
            and ("reward_funcs" in arguments or "train_dataset" in arguments)
        ):
            self.args = DEFAULTS[algorithm]()
        self._names = TABLES[algorithm]
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
        if "train_dataset" in self.given:
            self.given["train_dataset"] = rows.prepared(self.given["train_dataset"])
        self.datasets: dict[str, Any] = {}
        self._ours: set[str] = set()

    def unwrapped(self, given: Given) -> Given:
        """Return the base of a PeftModel whose adapter is new; its LoRA configuration becomes `peft_config`.

        Raises ConfigError for several adapters, and for one that has learned something.
        """
        model: Any = given.model
        if not any(cls.__name__ == "PeftModel" for cls in type(model).__mro__):
            return given
        if self.given.get("peft_config") is not None:
            raise ConfigError("The model is a PeftModel already. Remove peft_config, or pass its base model.")
        trained = any(
            bool(tensor.any()) for name, tensor in model.named_parameters() if "lora_B" in name.split(".")
        )
        if trained or len(model.peft_config) != 1:
            raise ConfigError(
                "The model is a PeftModel with several adapters or a trained one, which cannot be trained further. Next: "
                "pass model.merge_and_unload(), with peft_config for a new adapter."
            )
        (self.given["peft_config"],) = model.peft_config.values()
        self._table["peft_config"].keys(self.given["peft_config"])  # refuses other methods than LoRA
        return replace(given, model=model.unload())

    def keys(self, dataset: Any, own: Mapping[str, Any]) -> Keys:
        """Return the configuration keys of the script, except those that `own`, rl4llm's keywords, override.

        Raises ConfigError if a name of the script and a key of rl4llm set the same.
        """
        facts = TrainingFacts(
            rows.count(self._one_of("train_dataset", "dataset", dataset)),
            int(os.environ.get("WORLD_SIZE", "1")),
        )
        ours = self._ours = set(_leaves(own))
        keys: Keys = {}
        for names, found in self._found(facts, ours):
            set_names = [name for name in names if name in self.given]
            for key in found:
                if set_names and key in ours:
                    raise ConfigError(
                        f"{' and '.join(set_names)} becomes {key}, which is also set. Set only one of them."
                    )
            keys |= {key: value for key, value in found.items() if key not in ours}
        self._warn()
        return keys

    def seen(self, given: Given) -> Keys:
        """Return the configuration keys of TRL's rows with images, except those that rl4llm's keywords or a file set."""
        dataset = self._one_of("train_dataset", "dataset", given.dataset)
        if self._configured or "train_dataset" not in self.given or not rows.show_images(dataset):
            return {}
        processor = self._one_of("processing_class", "tokenizer", given.tokenizer)
        images.check_processor(processor, rows.source(given.model))
        found = images.keys_of(given.model, adapter=self.given.get("peft_config") is not None)
        return {key: value for key, value in found.items() if key not in self._ours}

    def objects(self, given: Given) -> Given:
        """Return the objects given under rl4llm's and TRL's names. Raises ConfigError if one is given under both."""
        dataset = self._one_of("train_dataset", "dataset", given.dataset)
        tokenizer = images.tokenizer_of(self._one_of("processing_class", "tokenizer", given.tokenizer))
        dataset, held_out = rows.prepared(dataset), rows.prepared(given.eval_dataset)
        self.datasets = {"train_dataset": dataset, "eval_dataset": held_out}
        plain = "train_dataset" in self.given and rows.is_plain(dataset)
        model = rows.trainable(given.model, self.algorithm)
        self._check_reference(given.model)
        given = replace(given, model=model, dataset=dataset, eval_dataset=held_out, tokenizer=tokenizer)
        given = self._with_rewards(given, plain=plain)
        if (made := self._environment()) is not None:
            if given.env_class is not None:
                raise ConfigError("tools and environment_factory make an environment. Remove env, or them.")
            given = replace(given, env_class=made)
        if "train_dataset" not in self.given:
            return given
        if self.algorithm == "sft":
            self._check_learned(dataset)
        read = rows.READERS.get(self.algorithm, rows.as_they_are)
        given = replace(given, dataset=read(dataset, plain), eval_dataset=read(given.eval_dataset, plain))
        if tokenizer is None and (plain or not isinstance(given.model, str | Path)):
            tokenizer = load_tokenizer(rows.source(given.model), self.given.get("pad_token"))
        self._check_strings(rows.strings(dataset, self.algorithm), tokenizer, given.model)
        return replace(given, tokenizer=rows.plain_text(tokenizer) if plain else tokenizer)

    def _with_rewards(self, given: Given, *, plain: bool) -> Given:
        functions, weights = self._reward_funcs(), self.given.get("reward_weights")
        if functions is None:
            if weights is not None:
                raise ConfigError(
                    "reward_weights needs reward_funcs. Next: set reward_funcs, or remove reward_weights."
                )
            return given
        self._one_of("reward_funcs", "reward_functions", given.reward_functions)
        made, total = rewards.reward_functions(functions, weights, plain=plain)
        return replace(given, reward_functions=made, reward_transform_fn=given.reward_transform_fn or total)

    def _reward_funcs(self) -> Any:
        """Return `reward_funcs`, and the reward of the environment's own `get_reward`, if it has one."""
        functions = self.given.get("reward_funcs")
        if not hasattr(self.given.get("environment_factory"), "get_reward"):
            return functions
        named = list(functions) if isinstance(functions, list | tuple) else [functions]
        return [*filter(None, named), rewards.of_environment]

    def _environment(self) -> Any:
        """Return the environment of `tools` and `environment_factory`, or None."""
        tools, factory = self.given.get("tools"), self.given.get("environment_factory")
        if not tools and factory is None:
            return None
        if isinstance(factory, Mapping):
            raise ConfigError(
                "environment_factory as a mapping has no counterpart. Next: use `parts`, one for each."
            )
        return environment.script_env(tuple(tools or ()), factory)

    def _check_reference(self, model: Any) -> None:
        """Refuse a reference other than the model that the run starts with."""
        reference = self.given.get("ref_model")
        if reference is not None and rows.source(reference) != rows.source(model):
            raise ConfigError(
                f"ref_model={rows.source(reference)!r} is not the trained model. Instead: {REFERENCE}; leave ref_model out."
            )

    def _check_strings(self, strings: Mapping[str, str], tokenizer: Any, model: Any) -> None:
        """Refuse strings that a chat template wrote, unless an option says what special tokens in texts are."""
        if not strings or "data.special_tokens" in self._ours:
            return
        special = (
            tokenizer or load_tokenizer(rows.source(model), self.given.get("pad_token"))
        ).all_special_tokens
        for name, text in strings.items():
            if found := [token for token in special if token in text]:
                raise ConfigError(
                    f"The column {name!r} has the special token {found[0]!r} in its strings, which is ordinary text here. "
                    "Next: pass messages instead of applying the chat template, or set data={'special_tokens': 'allow'}."
                )

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

    def _one_of(self, name: str, own_name: str, own: Any) -> Any:
        """Return the object given under TRL's name or under rl4llm's. Raises ConfigError for both."""
        if self.given.get(name) is None:
            return own
        if own is not None:
            raise ConfigError(f"{name} and {own_name} have the same meaning. Set only one of them.")
        return self.given[name]

    def _found(self, facts: TrainingFacts, ours: set[str]) -> Iterator[tuple[tuple[str, ...], Keys]]:
        """Yield keys, with the names that they come from."""
        defaults = {name: alias.default for name, alias in self._names.items()}
        for name, value in ((defaults if self.args else {}) | self.given).items():
            self._check(name, value, self._table[name])
            yield (name,), self._table[name].keys(value)
        for joint in JOINTS[self.algorithm]:
            if joint.keys is steps and "max_steps" in ours and "max_steps" not in self.given:
                continue
            if self.args or any(name in self.given for name in joint.names):
                yield joint.names, joint.keys(defaults | self.given, facts)

    def _checked(self, args: Any) -> TRLConfig | None:
        if args is not None and not isinstance(args, TRLConfig):
            known = ", ".join(cls.__name__ for cls in TRLConfig.__subclasses__())
            raise ConfigError(
                f"args={args!r:.60} is not accepted. Accepted: {known}, imported from rl4llm_compat.trl instead of trl."
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


POSITIONS = {
    "grpo": ("reward_funcs", "args", "train_dataset"),
    "rloo": ("reward_funcs", "args", "train_dataset"),
    "dpo": ("ref_model", "args", "data_collator", "train_dataset"),
    "kto": ("ref_model", "args", "data_collator", "train_dataset"),
    "sft": ("args", "data_collator", "train_dataset"),
    "reward_model": ("args", "data_collator", "train_dataset"),
}
"""TRL's order of the arguments after the model."""


def named(algorithm: str, values: Sequence[Any], arguments: dict[str, Any]) -> None:
    """Add positional arguments in TRL's order to `arguments`. Raises ConfigError for too many, or one given twice."""
    names = POSITIONS.get(algorithm, ())
    values = list(values)
    while values and values[-1] is None:
        values.pop()
    if len(values) > len(names):
        raise ConfigError(
            f"{len(values) + 1} positional arguments, but TRL's order is: model, {', '.join(names)}. Use names."
        )
    for name, value in zip(names, values, strict=False):
        if name in arguments:
            raise ConfigError(f"{name} is given by position and by name. Remove one of them.")
        if value is not None:
            arguments[name] = value


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
