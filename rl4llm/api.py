"""The Python API: one expression creates a trainer, and accepts everything that a configuration file can set.

    from rl4llm import GRPOTrainer

    trainer = GRPOTrainer(model="path/to/model", dataset=rows, reward_functions=[my_reward], training={"lr": 1e-5})
    trainer.train()

It also accepts the names of TRL, see `rl4llm.extensions.trl`. A TRL script needs only another import:

    from rl4llm import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(model="path/to/model", reward_funcs=my_reward, train_dataset=rows, args=GRPOConfig(beta=0.01))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from rl4llm.compose import Given, build_trainer
from rl4llm.config import Config, load_config
from rl4llm.core.base_env import BaseMDPEnv, RewardTransform
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import elsewhere, import_name, load


class PolicyTrainer:
    """Build a run from Python objects; subclasses name the algorithm.

    Args:
        model: a Hugging Face directory, a hub name, or a loaded causal LM (then `tokenizer` too); or in `config`.
        dataset: a path, a `datasets.Dataset` or a list of rows with `messages` and `ground_truth`.
        reward_functions: rewards, registered names, or plain callables ``f(completions, **columns) -> list[float]``.
        eval_dataset: held-out prompts; without it nothing is evaluated.
        env: a subclass of `BaseMDPEnv`, a registered name, or that section of a configuration, ``{"name": "tool",
            "tools": [search]}``; by default a prompt is answered in one turn.
        config: a YAML file to start from.
        overrides: configuration keys, ``max_steps=20``, ``training={"lr": 1e-5}`` or ``**{"training.lr": 1e-5}``; and the
            names of TRL, ``train_dataset``, ``reward_funcs``, ``num_generations``, which docs/migration.md lists.
    """

    algorithm: ClassVar[str]

    def __init__(
        self,
        model: Any = None,
        dataset: Any = None,
        reward_functions: Sequence[Any] | None = None,
        *others: Any,
        tokenizer: Any = None,
        eval_dataset: Any = None,
        reward_transform_fn: RewardTransform | None = None,
        env: type[BaseMDPEnv] | Mapping[str, Any] | str | None = None,
        config: str | Path | None = None,
        **overrides: Any,
    ):
        dataset, reward_functions = _by_position(
            self.algorithm, (dataset, reward_functions, *others), overrides
        )
        script = _script(self.algorithm, overrides, configured=config is not None)
        _check_model(model, overrides)
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
        if script is not None:
            given = script.unwrapped(given)
            keys |= script.keys(given.dataset, overrides)
            given = script.objects(given)
        for key, what, thing in (
            ("model.path", "model", given.model),
            ("data.path", "dataset", given.dataset),
        ):
            if thing is not None:
                keys[key] = str(thing) if isinstance(thing, str | Path) else f"a {type(thing).__name__}"
            if isinstance(thing, str | Path):
                given = replace(given, **{what: None})
        if (
            given.eval_dataset is None
            and config is None
            and not any(key.partition(".")[0] == "eval" for key in keys)
        ):
            keys["eval.every"] = 0
        self._trained = False
        self._script = script
        self._given = given
        self.config = load_config(config, _named(keys))
        self.trainer = build_trainer(self.config, given)

    def train(self, resume_from_checkpoint: bool | None = None) -> Self:
        """Train until `max_steps`, or resume the run in `output.dir`. It always resumes, so True has no effect.

        The returned trainer has what TRL's scripts read next: `metrics`, `global_step` and `training_loss`.
        """
        if resume_from_checkpoint not in (None, True):
            raise ConfigError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} is not accepted: a run always resumes from its last "
                "checkpoint. Choose another output.dir to start a new run."
            )
        if self._trained:
            raise ConfigError(
                "This trainer has already run. Create a new one; with the same output.dir it resumes."
            )
        self._trained = True
        with self.trainer as trainer:
            trainer.train()
        return self

    def __getattr__(self, name: str) -> Any:
        """Return what TRL's trainers have besides, such as `accelerator` or `evaluate`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return load("rl4llm.extensions.trl.trainer:attribute", f"trainer.{name}")(self, name)

    @property
    def model(self) -> Any:
        """Return the policy with its current weights."""
        return self.trainer.backend.model

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Do the same as `save_pretrained`, by default into the run's directory; the name is TRL's."""
        self.save_pretrained(output_dir or self.config.output.dir)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the policy and its tokenizer as a Hugging Face directory."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.trainer.export(Path(directory))


def _by_position(algorithm: str, values: tuple[Any, ...], overrides: dict[str, Any]) -> tuple[Any, Any]:
    """Return the dataset and the rewards of positional arguments; those in TRL's order become overrides instead."""
    second = values[0]
    if isinstance(second, list | tuple):
        ours = not any(map(callable, second))
    else:
        ours = second is None or isinstance(second, str | Path) or hasattr(second, "__iter__")
    if ours and len(values) == 2:
        return second, values[1]
    load("rl4llm.extensions.trl.script:named", "A trainer with TRL's order of arguments")(
        algorithm, values, overrides
    )
    return None, None


def _script(algorithm: str, overrides: dict[str, Any], *, configured: bool) -> Any:
    """Return the script of arguments that have names of TRL, or None if all are configuration keys."""
    ours = {item.name for item in fields(Config)}
    foreign = next((name for name in overrides if name.partition(".")[0] not in ours), None)
    if foreign is None:
        return None
    script = load("rl4llm.extensions.trl.script:Script", f"{foreign!r}, a name of TRL's,")
    return script(algorithm, overrides, configured=configured)


def _check_model(model: Any, overrides: Mapping[str, Any]) -> None:
    """Answer the arguments of another project's trainer, whose model has another name."""
    answers = [answer for name in overrides if model is None and (answer := elsewhere("key", name))]
    if answers:
        raise ConfigError(answers[0])


def _env_class(env: Any) -> type[BaseMDPEnv] | None:
    """Return the environment if it is a class, and None if configuration keys name it."""
    if env is None or isinstance(env, Mapping | str):
        return None
    if isinstance(env, type) and issubclass(env, BaseMDPEnv):
        return env
    raise ConfigError(
        f"env={env!r} is not accepted. Accepted: a subclass of BaseMDPEnv (not an instance), a registered name "
        "such as 'tool', or {'name': 'tool', ...} with its options."
    )


def _named(value: Any, key: str = "") -> Any:
    """Return a configuration value in which import names replace functions and classes."""
    if isinstance(value, Mapping):
        return {name: _named(item, f"{key}.{name}".strip(".")) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item, key) for item in value]
    if not callable(value):
        return value
    if (name := import_name(value)) is None:
        raise ConfigError(
            f"{key}: {value!r} is not accepted. The run stores its configuration, so a function or class must be importable "
            "by name. Define it at the top level of a module."
        )
    return name


class PPOTrainer(PolicyTrainer):
    """Proximal Policy Optimization with a critic."""

    algorithm = "ppo"


class GRPOTrainer(PolicyTrainer):
    """Group Relative Policy Optimization."""

    algorithm = "grpo"


class RLOOTrainer(PolicyTrainer):
    """REINFORCE with a leave-one-out baseline."""

    algorithm = "rloo"


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
