"""The Python API: a trainer in one expression, with everything a configuration file can say.

    from rl4llm import GRPOTrainer

    trainer = GRPOTrainer(model="path/to/model", dataset=rows, reward_functions=[my_reward], training={"lr": 1e-5})
    trainer.train()

The names of TRL are accepted too, see `rl4llm.trl`, so a script of TRL's moves over by its import:

    from rl4llm import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(model="path/to/model", reward_funcs=my_reward, train_dataset=rows, args=GRPOConfig(beta=0.01))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from rl4llm.build import Given, build_trainer
from rl4llm.config import load_config
from rl4llm.core.base_env import BaseMDPEnv, RewardTransform
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import import_name
from rl4llm.trl.script import Script


class PolicyTrainer:
    """Builds a run from Python objects; subclasses name the algorithm.

    Args:
        model: a Hugging Face directory, a hub name, or a loaded causal LM (then `tokenizer` too).
        dataset: a path, a `datasets.Dataset` or a list of rows with `messages` and `ground_truth`.
        reward_functions: rewards, registered names, or plain callables ``f(completions, **columns) -> list[float]``.
        eval_dataset: held-out prompts; none are measured without it.
        env: a subclass of `BaseMDPEnv`, a registered name, or that section of a configuration, ``{"name": "tool",
            "tools": [search]}``; by default a prompt is answered in one turn.
        config: a YAML file to start from.
        overrides: configuration keys, ``max_steps=20``, ``training={"lr": 1e-5}`` or ``**{"training.lr": 1e-5}``; and the
            names of TRL, ``train_dataset``, ``reward_funcs``, ``num_generations``, which docs/migration.md lists.
    """

    algorithm: ClassVar[str]

    def __init__(
        self,
        model: Any,
        dataset: Any = None,
        reward_functions: Sequence[Any] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: Any = None,
        reward_transform_fn: RewardTransform | None = None,
        env: type[BaseMDPEnv] | Mapping[str, Any] | str | None = None,
        config: str | Path | None = None,
        **overrides: Any,
    ):
        script = Script(self.algorithm, overrides)
        given = Given(
            model=model,
            tokenizer=tokenizer,
            dataset=dataset,
            eval_dataset=eval_dataset,
            reward_functions=reward_functions,
            reward_transform_fn=reward_transform_fn,
            env_class=_env_class(env),
        )
        keys = {"algorithm": {"name": self.algorithm}} | overrides
        if isinstance(env, str | Mapping):
            keys["env"] = {"name": env} if isinstance(env, str) else env
        if isinstance(keys["algorithm"], Mapping):
            keys["algorithm"] = {"name": self.algorithm, **keys["algorithm"]}
        keys |= script.keys(given.dataset, overrides)
        given = script.objects(given)
        for key, what, thing in (("model.path", "model", given.model), ("data.path", "dataset", given.dataset)):
            if thing is not None:
                keys[key] = str(thing) if isinstance(thing, str | Path) else f"a {type(thing).__name__}"
            if isinstance(thing, str | Path):
                given = replace(given, **{what: None})
        if given.eval_dataset is None and config is None and not any(key.partition(".")[0] == "eval" for key in keys):
            keys["eval.every"] = 0
        self._trained = False
        self.config = load_config(config, _named(keys))
        self.trainer = build_trainer(self.config, given)

    def train(self, resume_from_checkpoint: bool | None = None) -> Self:
        """Train, or go on with the run in `output.dir`, until `max_steps`; it goes on by itself, so True changes nothing."""
        if resume_from_checkpoint not in (None, True):
            raise ConfigError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} is not accepted: a run goes on from its last "
                "checkpoint. Choose another output.dir to begin anew."
            )
        if self._trained:
            raise ConfigError("This trainer is done and closed. Build another one; with the same output.dir it goes on.")
        self._trained = True
        with self.trainer as trainer:
            trainer.train()
        return self

    @property
    def model(self) -> Any:
        """The policy as it stands."""
        return self.trainer.backend.model

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """As TRL's: like `save_pretrained`, into the run's directory where none is named."""
        self.save_pretrained(output_dir or self.config.output.dir)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the policy and its tokenizer as a Hugging Face directory."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.trainer.export(Path(directory))


def _env_class(env: Any) -> type[BaseMDPEnv] | None:
    """The environment where it is a class; None where configuration keys say which it is."""
    if env is None or isinstance(env, Mapping | str):
        return None
    if isinstance(env, type) and issubclass(env, BaseMDPEnv):
        return env
    raise ConfigError(
        f"env={env!r} is not accepted: a subclass of BaseMDPEnv, not an instance of it, a registered name such as 'tool', "
        "or {'name': 'tool', ...} with its options."
    )


def _named(value: Any, key: str = "") -> Any:
    """A value of a configuration in which functions and classes stand by the names that they are imported by."""
    if isinstance(value, Mapping):
        return {name: _named(item, f"{key}.{name}".strip(".")) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item, key) for item in value]
    if not callable(value):
        return value
    if (name := import_name(value)) is None:
        raise ConfigError(
            f"{key}: {value!r} is not accepted: the configuration is stored with the run and read again, so a function or "
            "class is known by its name at the top level of a module. Define it there."
        )
    return name


class PPOTrainer(PolicyTrainer):
    """Proximal Policy Optimization with a critic."""

    algorithm = "ppo"


class GRPOTrainer(PolicyTrainer):
    """Group Relative Policy Optimization."""

    algorithm = "grpo"


class SFTTrainer(PolicyTrainer):
    """Imitation of conversations: rows with `messages`; takes no rewards."""

    algorithm = "sft"


class DPOTrainer(PolicyTrainer):
    """Direct Preference Optimization: rows with `chosen` and `rejected`; takes no rewards."""

    algorithm = "dpo"


class KTOTrainer(PolicyTrainer):
    """Kahneman-Tversky Optimization: rows with `prompt`, `completion` and `label`; takes no rewards."""

    algorithm = "kto"


class RewardTrainer(PolicyTrainer):
    """A reward model: rows with `chosen` and `rejected`. What it exports is the reward "reward_model" of later runs."""

    algorithm = "reward_model"


class DAPOTrainer(PolicyTrainer):
    """GRPO with DAPO's clip-higher, token mean and dynamic sampling."""

    algorithm = "dapo"
