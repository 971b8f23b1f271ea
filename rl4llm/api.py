"""The Python API: one expression creates a trainer, and accepts everything that a configuration file can set.

from rl4llm import GRPOTrainer

trainer = GRPOTrainer(model="path/to/model", dataset=rows, reward_functions=[my_reward], training={"lr": 1e-5})
trainer.train()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from rl4llm.compose import Given, build_trainer
from rl4llm.config import flatten, load_config
from rl4llm.core.base_env import BaseMDPEnv, RewardTransform
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import elsewhere, from_extension, import_name
from rl4llm.tracking.history import MetricsTable


class PolicyTrainer:
    """Build a run from Python objects; subclasses name the algorithm.

    Args:
        model: a Hugging Face directory, a hub name, or a loaded causal LM (then `tokenizer` too); or in `config`.
        dataset: a path, a `datasets.Dataset` or a list of rows with `messages` and `ground_truth`.
        reward_functions: rewards, registered names, or functions ``f(completions, **columns) -> list[float]``; or one.
        eval_dataset: held-out prompts; without it nothing is evaluated.
        env: a subclass of `BaseMDPEnv`, a registered name, or that section of a configuration, ``{"name": "tool",
            "tools": [search]}``; by default a prompt is answered in one turn.
        config: a YAML file to start from.
        overrides: configuration keys, ``max_steps=20``, ``training={"lr": 1e-5}`` or ``**{"training.lr": 1e-5}``.
    """

    algorithm: ClassVar[str]

    def __init__(
        self,
        model: Any = None,
        dataset: Any = None,
        reward_functions: Sequence[Any] | Callable[..., Any] | Mapping[str, Any] | str | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: Any = None,
        reward_transform_fn: RewardTransform | None = None,
        env: type[BaseMDPEnv] | Mapping[str, Any] | str | None = None,
        config: str | Path | None = None,
        **overrides: Any,
    ):
        _check_model(model, overrides)
        if callable(reward_functions) or isinstance(reward_functions, str | Mapping):
            reward_functions = [reward_functions]
        given = Given(
            model=model,
            tokenizer=tokenizer,
            dataset=dataset,
            eval_dataset=eval_dataset,
            reward_functions=reward_functions,
            reward_transform_fn=reward_transform_fn,
            env_class=_env_class(env),
        )
        keys = {"algorithm": {"name": self.algorithm}} | _home(config, overrides) | overrides
        if isinstance(env, str | Mapping):
            keys["env"] = {"name": env} if isinstance(env, str) else env
        if isinstance(keys["algorithm"], Mapping):
            keys["algorithm"] = {"name": self.algorithm, **keys["algorithm"]}
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
        self._given = given
        self.config = load_config(config, _named(keys))
        self.trainer = build_trainer(self.config, given)

    def __repr__(self) -> str:
        where, step = str(self.trainer.run.path), self.trainer.step
        return f"{type(self).__name__}({where!r}, step {step} of {self.trainer.schedule.max_steps})"

    def train(self) -> Self:
        """Train until `max_steps`, or resume the run in `output.dir`."""
        if self._trained:
            raise ConfigError(
                "This trainer has already run. Create a new one; with the same output.dir it resumes."
            )
        self._trained = True
        with self.trainer as trainer:
            trainer.train()
            if not trainer.stopped:
                trainer.tracker.note(f"Done. The model is in {trainer.run.model_dir}.")
        return self

    def evaluate(self, samples: int = 1) -> dict[str, float]:
        """Return the metrics of `samples` answers to each held-out prompt, by the run's last checkpoint or before any.

        It trains and writes nothing, and loads the model beside this trainer's. Raises ConfigError without held-out prompts.
        """
        evaluate = from_extension("evaluate", "trainer.evaluate()")
        return dict(evaluate(self.config, samples, self._given).metrics)

    @property
    def model(self) -> Any:
        """Return the policy with its current weights."""
        return self.trainer.backend.model

    @property
    def history(self) -> MetricsTable:
        """Return the metrics of the run so far, as a table with a row per step."""
        return MetricsTable.of(self.trainer.run)

    def view(self, episodes: int = 50) -> Any:
        """Return the page of the run with some of its episodes; a notebook shows it below the cell."""
        return from_extension("notebook_page", "trainer.view()")(self.trainer.run.path, episodes)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the policy and its tokenizer as a Hugging Face directory."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.trainer.export(Path(directory))


def _home(config: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the directory of a script's runs, named like it, unless the user names one; {} where no script runs."""
    file = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    name = (file.parent if file.stem == "__main__" else file).stem
    names_it = config or "output.dir" in flatten(overrides)
    return {} if names_it or not name else {"output.dir": f"runs/{name}"}


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
