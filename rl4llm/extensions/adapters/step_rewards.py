"""Environments that return a reward for each step, and that reward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl4llm.core.base_env import BaseMDPEnv, SampleState
from rl4llm.core.base_reward import BaseBatchReward, policy_messages
from rl4llm.core.errors import EnvError
from rl4llm.core.types import ChatMessage

COLUMN = "step_rewards"


class StepsEnv(BaseMDPEnv):
    """Plays an object of another library for each sample, from the first turn to the end of the episode."""

    default_rewards = ("env_steps",)
    made_from: ClassVar[str]
    """The column of a prompt that describes its object."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._playing: dict[int, tuple[SampleState, Any]] = {}  # by id of the sample
        super().__init__(*args, **kwargs)

    @abstractmethod
    def make(self, column: Mapping[str, Any]) -> Any:
        """Return a new object for this column of a prompt."""

    @abstractmethod
    def begin(self, env: Any, column: Mapping[str, Any]) -> list[str]:
        """Begin its episode; return the last messages of the prompt, as the object gives them."""

    def playing(self, sample: SampleState) -> Any:
        """Return the sample's object. Raises EnvError if it does not begin as in the prompt."""
        if id(sample) not in self._playing:
            column = sample.columns[self.made_from]
            env = self.make(column)
            self._playing[id(sample)] = (sample, env)
            opening = self.begin(env, column)
            prompt = [message.content for message in sample.messages[: sample.init_msg_size]]
            if prompt[-len(opening) :] != opening:
                raise EnvError(
                    f"{column.get('task', 'The environment')} does not begin as in its prompt, although the seed is the "
                    f"same: {opening[-1]!r:.200}. Next: draw all random numbers from the seed."
                )
        return self._playing[id(sample)][1]

    def end_episode(self, sample: SampleState) -> None:
        """Close the sample's object, if it can be closed."""
        _, env = self._playing.pop(id(sample), (sample, None))
        close = getattr(env, "close", None)
        if callable(close):
            close()


def invalid(sample: SampleState, reply: str) -> list[ChatMessage]:
    """Return the reply to a turn without an action, which the metric `invalid_actions` counts."""
    sample.extras["metrics"]["invalid_actions"] += 1
    return [ChatMessage("user", reply)]


def note_reward(sample: SampleState, reward: float) -> None:
    """Keep the environment's reward for the policy's last turn, and add it to the metric `return`."""
    sample.extras.setdefault(COLUMN, {})[str(len(policy_messages(sample)) - 1)] = float(reward)
    metrics = sample.extras.setdefault("metrics", {})
    metrics["return"] = metrics.get("return", 0.0) + float(reward)


class StepRewards(BaseBatchReward):
    """The environment's own reward for each turn; 0 for turns that never reached it because they were cut short.

    For environments that return rewards, such as `gymnasium`.
    """

    needs_ground_truth = False
    per_turn = True

    def __init__(self, name: str = "env_steps"):
        super().__init__(name)

    def score_batch(self, samples: Sequence[SampleState]) -> list[Any]:
        return [_scores(sample) for sample in samples]


def _scores(sample: SampleState) -> list[float]:
    rewards = sample.extras.get(COLUMN, {})
    return [rewards.get(str(turn), 0.0) for turn in range(len(policy_messages(sample)))]
