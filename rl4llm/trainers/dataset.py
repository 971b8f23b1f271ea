"""Learning from a dataset: the same loop, but it reads its data instead of sampling it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl4llm.backends.source_form import save_tokenizer
from rl4llm.core.base_backend import of_update
from rl4llm.core.types import Group, Update
from rl4llm.data.prompts import PromptStream
from rl4llm.trainers.base_trainer import BaseTrainer, Step
from rl4llm.trainers.prepare import Preparation


class DatasetTrainer(BaseTrainer[Step]):
    """Learns from the rows of a dataset, `rollout.prompts` of them per step; `read` makes a group of each.

    It also measures the loss and the algorithm's metrics on `held_out` rows, which `measuring` packs. `fitting` makes such
    rows of any data set.
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
        fitting: Callable[[Any], Sequence[dict[str, Any]]],
        measuring: Preparation,
        **base: Any,
    ):
        super().__init__(**base)
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.read = read
        self.prompts = prompts
        self.preparation = preparation
        self.held_out = held_out
        self.fitting = fitting
        self.measuring = measuring

    def collect(self) -> Step:
        """Return the next rows as tokens with authors."""
        with self.clock("collect"):
            return Step([self._group(self.dataset, row) for row in self.prompts.next_batch()])

    def prepare(self, step: Step) -> list[Update]:
        """Return the optimizer steps of these rows."""
        with self.clock("prepare"):
            return self.preparation.prepare(step.groups, self.step).updates

    def publish(self) -> None:
        """Do nothing, since no engine samples from these weights."""

    def report(self, step: Step) -> None:
        tokens = sum(trajectory.num_tokens for trajectory in step.trajectories)
        self.tracker.step(self.step, (), (), step.metrics, tokens=tokens, counts=self._special_tokens(step))

    def evaluate(self) -> None:
        """Measure the loss on the held-out rows."""
        if not self.held_out:
            return
        with self.clock("evaluate"):
            measured = self._measured(self.held_out)
        self.tracker.measured(self.step, measured)

    def measure(self, rows: Any) -> dict[str, float]:
        """Return the loss and the algorithm's metrics on other rows, given as any data set is; nothing is logged."""
        return self._measured(self.fitting(rows))

    @torch.no_grad()
    def _measured(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        shared = range(self.ranks.rank, len(rows), self.ranks.size)
        groups = [self._group(rows, row) for row in shared]
        parts = [
            self.backend.forward_backward(batch, **self.objective(update))
            for update in self.measuring.prepare(groups, self.step).updates
            for batch in update.batches
        ]
        return of_update(parts, self.ranks)

    def export(self, directory: Path) -> None:
        """Write the policy and its tokenizer as a Hugging Face directory."""
        if self.ranks.is_first:
            save_tokenizer(self.tokenizer, directory)
        self.backend.export(directory)

    def state(self) -> dict[str, Any]:
        return {"prompts": self.prompts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.prompts.restore(state["prompts"])

    def _group(self, rows: Sequence[dict[str, Any]], row: int) -> Group:
        return self.read(rows[row], str(rows[row].get("prompt_id", row)))

    def _special_tokens(self, step: Step) -> dict[str, float]:
        """Return the mean of the special tokens in the texts of rows that have any, for the log."""
        noted = (trajectory.extras.get("metrics", {}) for trajectory in step.trajectories)
        counts = [metrics["special_tokens"] for metrics in noted if "special_tokens" in metrics]
        total, rows = self.ranks.total(torch.tensor([sum(counts), len(counts)])).tolist()
        return {"env/special_tokens": total / rows} if rows else {}
