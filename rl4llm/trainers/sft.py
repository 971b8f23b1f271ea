"""Supervised fine-tuning: the same loop, but what is learned from is read instead of sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl4llm.core.base_trainer import BaseTrainer
from rl4llm.core.types import ChatMessage, TrainBatch, Trajectory
from rl4llm.data.demonstrations import demonstration
from rl4llm.data.prompts import PromptStream
from rl4llm.data.render import Renderer
from rl4llm.tracking.run import RunTracker
from rl4llm.trainers.rl import Batching


class SFTTrainer(BaseTrainer[list[Trajectory]]):
    """Imitates the assistant messages of the conversations in a dataset, `rollout.prompts` of them per step."""

    def __init__(
        self,
        *,
        dataset: Sequence[dict[str, Any]],
        tokenizer: Any,
        renderer: Renderer,
        prompts: PromptStream,
        batching: Batching,
        tracker: RunTracker,
        **base: Any,
    ):
        super().__init__(**base)
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.prompts = prompts
        self.batching = batching
        self.tracker = tracker

    def collect(self) -> list[Trajectory]:
        """The next conversations, as tokens with authors."""
        with self.clock("collect"):
            return [self._trajectory(row) for row in self.prompts.next_batch()]

    def prepare(self, collected: list[Trajectory]) -> list[list[TrainBatch]]:
        """Their optimizer steps."""
        shares = self.batching.updates(collected)
        return [self.batching.pack(share, [0.0] * len(share), self.batching.totals(share)) for share in shares]

    def publish(self) -> None:
        """No engine samples from these weights."""

    def report(self, collected: list[Trajectory], metrics: Sequence[dict[str, float]]) -> None:
        self.tracker.step(self.step, (), (), metrics, tokens=sum(trajectory.num_tokens for trajectory in collected))

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

    def _trajectory(self, row: int) -> Trajectory:
        columns = self.dataset[row]
        messages = [ChatMessage.from_dict(message) for message in columns["messages"]]
        return demonstration(self.renderer, messages, str(columns.get("prompt_id", row)))
