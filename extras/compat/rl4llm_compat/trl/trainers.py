"""TRL's trainers: those of rl4llm, with TRL's names for their arguments and attributes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rl4llm.api import PolicyTrainer
from rl4llm.compose import Given
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import ConfigError
from rl4llm_compat.trl.attributes import attribute
from rl4llm_compat.trl.script import Script, named

OBJECTS = ("dataset", "eval_dataset", "reward_functions", "reward_transform_fn", "tokenizer")
"""What a trainer takes as Python objects, beside the model and the environment."""


class TRLTrainer(PolicyTrainer):
    """Build a run from the arguments of one of TRL's trainers, in TRL's order.

    It also takes the keywords of rl4llm's trainers, unless both set the same option. docs/migration.md lists TRL's names.
    """

    def __init__(
        self,
        model: Any = None,
        *positional: Any,
        env: type[BaseMDPEnv] | Mapping[str, Any] | str | None = None,
        config: str | Path | None = None,
        **arguments: Any,
    ):
        named(self.algorithm, positional, arguments)
        self._script = script = Script(self.algorithm, arguments, configured=config is not None)
        objects = {name: arguments.pop(name, None) for name in OBJECTS}
        given = Given(model=model, env_class=env if isinstance(env, type) else None, **objects)
        given = script.unwrapped(given)
        keys = arguments | script.keys(given.dataset, arguments) | script.seen(given)
        given = script.objects(given)
        objects = {name: getattr(given, name) for name in OBJECTS}
        super().__init__(given.model, **objects, env=given.env_class or env, config=config, **keys)

    def train(self, resume_from_checkpoint: bool | None = None) -> Self:
        """Train until `max_steps`, or resume the run in `output.dir`. It always resumes, so True has no effect.

        The returned trainer has what TRL's scripts read next: `metrics`, `global_step` and `training_loss`.
        """
        if resume_from_checkpoint not in (None, True):
            raise ConfigError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} is not accepted: a run always resumes from its last "
                "checkpoint. Choose another output.dir to start a new run."
            )
        return super().train()

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Do the same as `save_pretrained`, by default into the run's directory."""
        self.save_pretrained(output_dir or self.config.output.dir)

    def evaluate(self, *data: Any, **options: Any) -> Any:  # TRL's, not that of rl4llm's trainers
        """Return what TRL's `evaluate` returns."""
        return attribute(self, "evaluate")(*data, **options)

    def __getattr__(self, name: str) -> Any:
        """Return what TRL's trainers have besides, such as `accelerator`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return attribute(self, name)


class DPOTrainer(TRLTrainer):
    """Train by Direct Preference Optimization."""

    algorithm = "dpo"


class GRPOTrainer(TRLTrainer):
    """Train by Group Relative Policy Optimization."""

    algorithm = "grpo"


class KTOTrainer(TRLTrainer):
    """Train by Kahneman-Tversky Optimization."""

    algorithm = "kto"


class RewardTrainer(TRLTrainer):
    """Train a reward model."""

    algorithm = "reward_model"


class RLOOTrainer(TRLTrainer):
    """Train by REINFORCE with a leave-one-out baseline."""

    algorithm = "rloo"


class SFTTrainer(TRLTrainer):
    """Train on conversations by imitation."""

    algorithm = "sft"
