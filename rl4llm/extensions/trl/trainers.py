"""TRL's trainers: those of rl4llm, with TRL's names for their arguments and attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rl4llm.api import PolicyTrainer
from rl4llm.compose import Given
from rl4llm.core.base_env import BaseMDPEnv, RewardTransform
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.trl.attributes import attribute
from rl4llm.extensions.trl.script import Script, named


class TRLTrainer(PolicyTrainer):
    """Build a run from the arguments of one of TRL's trainers, in TRL's order.

    It also takes the keywords of rl4llm's trainers, unless both set the same option. docs/migration.md lists TRL's names.
    """

    def __init__(
        self,
        model: Any = None,
        *positional: Any,
        dataset: Any = None,
        reward_functions: Sequence[Any] | None = None,
        tokenizer: Any = None,
        eval_dataset: Any = None,
        reward_transform_fn: RewardTransform | None = None,
        env: type[BaseMDPEnv] | Mapping[str, Any] | str | None = None,
        config: str | Path | None = None,
        **arguments: Any,
    ):
        named(self.algorithm, positional, arguments)
        self._script = script = Script(self.algorithm, arguments, configured=config is not None)
        given = Given(
            model=model,
            tokenizer=tokenizer,
            dataset=dataset,
            eval_dataset=eval_dataset,
            reward_functions=reward_functions,
            reward_transform_fn=reward_transform_fn,
            env_class=env if isinstance(env, type) else None,
        )
        given = script.unwrapped(given)
        keys = arguments | script.keys(given.dataset, arguments)
        given = script.objects(given)
        super().__init__(
            given.model,
            given.dataset,
            given.reward_functions,
            tokenizer=given.tokenizer,
            eval_dataset=given.eval_dataset,
            reward_transform_fn=given.reward_transform_fn,
            env=given.env_class or env,
            config=config,
            **keys,
        )

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

    def __getattr__(self, name: str) -> Any:
        """Return what TRL's trainers have besides, such as `accelerator` or `evaluate`."""
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
