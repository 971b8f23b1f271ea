"""The reward of a task: what its hidden tests said after the episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.core.base_env import SampleState
from rl4llm.core.base_reward import BaseBatchReward
from rl4llm.core.errors import DataError
from rl4llm.extensions.tasks.task import read_task
from rl4llm.rewards.pool import RewardFailure

NO_TESTS = "no tests ran. Set env.name=shell, or env.workspace of an agent."


class TaskReward(BaseBatchReward):
    """The verdict of the task's hidden tests, from 0.0 to 1.0.

        rewards: [task]

    The environment runs the tests when an episode ends, and stores their verdict in ``sample.extras["task"]``. A sample
    without a verdict fails; it never scores 0.
    """

    success_at = 1.0
    needs_ground_truth = False

    def __init__(self, name: str = "task"):
        super().__init__(name)

    def score_batch(self, samples: Sequence[SampleState]) -> list[float | RewardFailure]:
        """Return the reward of each verdict, or a RewardFailure where no tests ran."""
        verdicts = [sample.extras.get("task") for sample in samples]
        return [float(item["reward"]) if item else RewardFailure(NO_TESTS) for item in verdicts]

    def check_row(self, ground_truth: Any, columns: Mapping[str, Any]) -> None:
        """Raise DataError for a row that is not a task."""
        if not columns.get("task"):
            raise DataError("the row has no column 'task'. Set data.path to a directory of tasks.")
        read_task(Path(columns["task"]))
