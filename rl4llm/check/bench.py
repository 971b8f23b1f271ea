"""What is checked: a configuration's own parts, each built once, and a trainer in a directory of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl4llm.build import build_algorithm, build_trainer
from rl4llm.build.models import all_ranks, set_up_torch
from rl4llm.build.options import Given
from rl4llm.build.trainer import AnyTrainer, build_sandbox
from rl4llm.config import Config
from rl4llm.core.base_algorithm import BaseAlgorithm
from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import Completion, Group, SamplingParams, WeightRef
from rl4llm.data.render import Renderer
from rl4llm.evaluate import scratch_of

FreeBytes = Callable[[Path], int]


class NotNeeded(Exception):
    """No error: there is nothing to check here, and the reason."""


def free_bytes(directory: Path) -> int:
    """Of the file system that a directory lies in."""
    return shutil.disk_usage(directory).free


@dataclass
class Part:
    """One of the environments of a run, "" where there is only one; what is None has not been built yet."""

    name: str
    config: Config
    given: Given
    dataset: Any = None
    held_out: Any = None
    rewards: Sequence[BaseRewardFunction] = ()
    transform: Any = None
    env: BaseMDPEnv | None = None
    renderer: Renderer | None = None

    @property
    def where(self) -> str:
        """In front of what is said of this part."""
        return f"{self.name}: " if self.name else ""


class Recorded(BaseClient):
    """An engine whose completions are kept as it gave them."""

    def __init__(self, engine: BaseClient):
        self._engine = engine
        self.context_length, self.vocab_size = engine.context_length, engine.vocab_size
        self.completions: list[Completion] = []

    async def generate(self, prompt_ids: Sequence[int], sampling_params: SamplingParams, *, session: str = "") -> Completion:
        completion = await self._engine.generate(prompt_ids, sampling_params, session=session)
        self.completions.append(completion)
        return completion

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self._engine.score(token_ids)

    async def load(self, weight_ref: WeightRef) -> None:
        await self._engine.load(weight_ref)

    async def version(self) -> int:
        return await self._engine.version()

    async def release(self, session: str) -> None:
        await self._engine.release(session)

    async def expect(self, session: str) -> None:
        await self._engine.expect(session)

    async def park(self, session: str) -> None:
        await self._engine.park(session)


@dataclass(frozen=True, slots=True)
class Played:
    """A few episodes: their groups, and every completion that the engine gave meanwhile."""

    groups: Sequence[Group]
    completions: Sequence[Completion]


class Bench:
    """A configuration under check. Its own directory is not touched, and everything runs in this one process.

    Args:
        config: the configuration; `backend` is taken as plain torch, which computes the same.
        free: how many bytes are free where a directory lies.
    """

    def __init__(self, config: Config, free: FreeBytes = free_bytes):
        if all_ranks(config).size > 1:
            raise ConfigError("check runs in one process. Start it without torchrun or a launcher.")
        self.config = config
        self.free = free
        self.algorithm: BaseAlgorithm = build_algorithm(config)
        self.sandbox = build_sandbox(config)
        self.tokenizer: Any = None
        self.parts: list[Part] = []
        self.trainer: AnyTrainer | None = None
        self.played: Played | None = None
        self._stack = ExitStack()
        set_up_torch(config)

    @property
    def samples(self) -> bool:
        """Whether the policy samples; else it learns from a dataset."""
        return self.algorithm.needs().learns_from == "episodes"

    def demand_episodes(self) -> None:
        """Raise NotNeeded where nothing is sampled."""
        if not self.samples:
            name, source = self.config.algorithm["name"], self.algorithm.needs().learns_from
            raise NotNeeded(f"algorithm.name={name} learns from {source} in a dataset; nothing is sampled")

    def build(self) -> AnyTrainer:
        """The trainer, as `rl4llm train` builds it, with nothing of it in the run's directory."""
        config = self._stack.enter_context(scratch_of(self.config))
        silent = replace(config.output, console="quiet")
        self.trainer = trainer = build_trainer(replace(config, output=silent, backend={"name": "torch"}))
        self._stack.enter_context(trainer)
        return trainer

    def close(self) -> None:
        """Let go of engines, environments, sandboxes and the scratch directory."""
        for part in self.parts:
            if part.env is not None:
                part.env.close()
        self._stack.close()
        self.sandbox.close()
