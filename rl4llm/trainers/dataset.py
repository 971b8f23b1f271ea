"""Learning from a dataset: the same loop, but what is learned from is read instead of sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.core.base_trainer import BaseTrainer
from rl4llm.core.types import Group, Update
from rl4llm.data.prompts import PromptStream
from rl4llm.tracking.run import RunTracker
from rl4llm.trainers.prepare import Preparation


class DatasetTrainer(BaseTrainer[list[Group]]):
    """Learns from the rows of a dataset, `rollout.prompts` of them per step; `read` makes a group of each."""

    def __init__(
        self,
        *,
        dataset: Sequence[dict[str, Any]],
        tokenizer: Any,
        read: Callable[[Mapping[str, Any], str], Group],
        prompts: PromptStream,
        preparation: Preparation,
        tracker: RunTracker,
        **base: Any,
    ):
        super().__init__(**base)
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.read = read
        self.prompts = prompts
        self.preparation = preparation
        self.tracker = tracker

    def collect(self) -> list[Group]:
        """The next rows, as tokens with authors."""
        with self.clock("collect"):
            rows = self.prompts.next_batch()
            return [self.read(self.dataset[row], str(self.dataset[row].get("prompt_id", row))) for row in rows]

    def prepare(self, collected: list[Group]) -> list[Update]:
        """Their optimizer steps."""
        with self.clock("prepare"):
            return self.preparation.prepare(collected, self.step).updates

    def publish(self) -> None:
        """No engine samples from these weights."""

    def report(self, collected: list[Group], metrics: Sequence[dict[str, float]]) -> None:
        tokens = sum(trajectory.num_tokens for group in collected for trajectory in group.trajectories)
        self.tracker.step(self.step, (), (), metrics, tokens=tokens)

    def evaluate(self) -> None:
        """The held-out set belongs to the reinforcement learning that follows."""

    def close(self) -> None:
        self.tracker.close()

    def export(self, directory: Path) -> None:
        """Write the policy and its tokenizer as a Hugging Face directory."""
        self.backend.export(directory)
        self.tokenizer.save_pretrained(directory)

    def state(self) -> dict[str, Any]:
        return {"prompts": self.prompts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.prompts.restore(state["prompts"])

    def begin(self, step: int) -> None:
        self.tracker.begin(step)

    def warn(self, text: str) -> None:
        self.tracker.warn(text)
