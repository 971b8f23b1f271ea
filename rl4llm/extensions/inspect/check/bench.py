"""What the checks run on: the parts of a configuration, each built once, and a trainer in a scratch directory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rl4llm.commands.scratch import scratch_of
from rl4llm.compose import build_trainer
from rl4llm.compose.choices import check_choices
from rl4llm.compose.environments import Provided, build_sandbox, provided_by
from rl4llm.compose.setup import Given, Setup, set_up_torch
from rl4llm.compose.trainer import AnyTrainer
from rl4llm.config import Config
from rl4llm.core.base_algorithm import BaseAlgorithm
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.types import Completion, Group


class NotNeeded(Exception):
    """Not an error: there is nothing to check, for the given reason."""


@dataclass
class Part:
    """One environment of a run, named "" if there is only one; a field that is None has not been built yet."""

    name: str
    setup: Setup
    dataset: Any = None
    held_out: Any = None
    rewards: Sequence[BaseRewardFunction] = ()
    transform: Any = None
    env: Any = None  # a BaseMDPEnv
    renderer: Any = None  # a Renderer

    @property
    def where(self) -> str:
        """Prefix of messages about this part."""
        return f"{self.name}: " if self.name else ""


class Recorded:
    """An engine, in all that it does, that also keeps its completions unchanged."""

    def __init__(self, engine: BaseClient):
        self._engine = engine
        self.completions: list[Completion] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *arguments: Any, **options: Any) -> Completion:
        completion = await self._engine.generate(*arguments, **options)
        self.completions.append(completion)
        return completion


class Bench:
    """A configuration under check. The run's directory is not touched, and everything runs in this one process.

    Plain torch replaces the configuration's `backend`, which computes the same.
    """

    def __init__(self, config: Config):
        self.setup = Setup.of(config)
        self.config = config
        self.algorithm: BaseAlgorithm = self.setup.algorithm
        self.shared = Provided({"sandbox": lambda: build_sandbox(config)})
        self.tokenizer: Any = None
        self.parts: list[Part] = []
        self.trainer: AnyTrainer  # once it is built
        self.groups: list[Group] = []  # that were played
        self.completions: list[Completion] = []  # of the engine while it played them
        self._stack = ExitStack()
        set_up_torch(config, self.setup.machine)

    @property
    def samples(self) -> bool:
        """Whether the policy samples; otherwise it learns from a dataset."""
        return self.algorithm.needs().learns_from == "episodes"

    def provided(self, part: Part) -> Provided:
        """Return what the run offers to the environment of a part; all parts share the sandbox."""
        return provided_by(part.setup, lambda: self.shared["sandbox"])

    @cached_property
    def scratch(self) -> Config:
        """The configuration with its files outside the run's directory."""
        return self._stack.enter_context(scratch_of(self.config))

    def build(self) -> AnyTrainer:
        """Build the trainer like `rl4llm train`, with its files outside the run's directory."""
        check_choices(self.config, Given(), self.algorithm.needs())
        silent = replace(self.scratch.output, console="quiet")
        plain = replace(self.scratch, output=silent, backend={"name": "torch"})
        self.trainer = trainer = build_trainer(plain)
        self._stack.enter_context(trainer)
        return trainer

    def close(self) -> None:
        """Close engines, environments and the sandbox, and remove the scratch directory."""
        for part in self.parts:
            if part.env is not None:
                part.env.close()
        self._stack.close()
        if "sandbox" in self.shared.made:
            self.shared["sandbox"].close()
