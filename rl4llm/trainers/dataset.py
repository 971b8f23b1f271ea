"""Learning from a dataset: the same loop, but what is learned from is read instead of sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl4llm.core.base_trainer import BaseTrainer, merge
from rl4llm.core.types import Group, Update
from rl4llm.data.prompts import PromptStream
from rl4llm.tracking.run import RunTracker
from rl4llm.trainers.prepare import Preparation


class DatasetTrainer(BaseTrainer[list[Group]]):
    """Learns from the rows of a dataset, `rollout.prompts` of them per step; `read` makes a group of each.

    The loss and the algorithm's metrics are measured on `held_out` rows too, which `measuring` makes one batch of.
    """

    def __init__(
        self,
        *,
        dataset: Sequence[dict[str, Any]],
        tokenizer: Any,
        read: Callable[[Mapping[str, Any], str], Group],
        prompts: PromptStream,
        preparation: Preparation,
        held_out: Sequence[dict[str, Any]],
        measuring: Preparation,
        tracker: RunTracker,
        **base: Any,
    ):
        super().__init__(**base)
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.read = read
        self.prompts = prompts
        self.preparation = preparation
        self.held_out = held_out
        self.measuring = measuring
        self.tracker = tracker

    def collect(self) -> list[Group]:
        """The next rows, as tokens with authors."""
        with self.clock("collect"):
            return [self._group(self.dataset, row) for row in self.prompts.next_batch()]

    def prepare(self, collected: list[Group]) -> list[Update]:
        """Their optimizer steps."""
        with self.clock("prepare"):
            return self.preparation.prepare(collected, self.step).updates

    def publish(self) -> None:
        """No engine samples from these weights."""

    def report(self, collected: list[Group], metrics: Sequence[dict[str, float]]) -> None:
        tokens = sum(trajectory.num_tokens for group in collected for trajectory in group.trajectories)
        self.tracker.step(self.step, (), (), metrics, tokens=tokens)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Measure the loss on the held-out rows."""
        if not self.held_out:
            return
        with self.clock("evaluate"):
            groups = [self._group(self.held_out, row) for row in range(len(self.held_out))]
            updates = self.measuring.prepare(groups, self.step).updates
            metrics = merge([self.forward_backward(batch) for update in updates for batch in update.batches])
        self.tracker.measured(self.step, metrics)

    def close(self) -> None:
        self.tracker.close()

    def export(self, directory: Path) -> None:
        """Write the policy and its tokenizer as a Hugging Face directory."""
        if self.ranks.is_first:
            self.tokenizer.save_pretrained(directory)
        self.backend.export(directory)

    def state(self) -> dict[str, Any]:
        return {"prompts": self.prompts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.prompts.restore(state["prompts"])

    def begin(self, step: int) -> None:
        self.tracker.begin(step)

    def warn(self, text: str) -> None:
        self.tracker.warn(text)

    def _group(self, rows: Sequence[dict[str, Any]], row: int) -> Group:
        return self.read(rows[row], str(rows[row].get("prompt_id", row)))
