"""The reward of environments that return one for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction, SampleState
from rl4llm.core.types import ChatMessage
from rl4llm.rewards.replies import policy_messages

COLUMN = "step_rewards"


def note_reward(sample: SampleState, reward: float) -> None:
    """Keep the environment's reward for the policy's last turn."""
    sample.extras.setdefault(COLUMN, {})[str(len(policy_messages(sample)) - 1)] = float(reward)


class StepRewards(BaseRewardFunction):
    """The environment's own reward for each turn; 0 for turns that never reached it because they were cut short.

    For environments that return rewards, such as `gymnasium`.
    """

    needs_ground_truth = False
    per_turn = True

    def __init__(self, name: str = "env_steps"):
        super().__init__(name)

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> Any:
        return [0.0] * sum(message.role == "assistant" for message in messages)

    def score_batch(self, samples: Sequence[SampleState]) -> list[Any]:
        return [_scores(sample) for sample in samples]


def _scores(sample: SampleState) -> list[float]:
    given = sample.extras.get(COLUMN, {})
    return [given.get(str(turn), 0.0) for turn in range(len(policy_messages(sample)))]
