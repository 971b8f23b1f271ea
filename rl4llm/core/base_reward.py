"""The contract of rewards, which users import from `rl4llm.core.base_env`."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Rational, Real
from typing import Any

from torch import Tensor

from rl4llm.core.errors import RewardError
from rl4llm.core.sample import SampleState
from rl4llm.core.types import ChatMessage
from rl4llm.runtime.runner import awaited

Score = float | Sequence[float]
"""What a reward returns: a number, or with ``per_turn`` one for each turn of the policy."""
RewardTransform = Callable[[dict[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class RewardExample:
    """A conversation and the score that a reward promises to give it, within `tolerance`.

    For a reward of turns the score is a list. `token_ids` stand for what the policy sampled, where a reward looks at that.
    """

    messages: Sequence[ChatMessage]
    ground_truth: Any
    score: Score
    columns: Mapping[str, Any] = field(default_factory=dict)
    token_ids: Sequence[int] = ()
    tolerance: float = 1e-6


class BaseRewardFunction(ABC):
    """A reward: called once per episode with the whole conversation.

        class ExactMatch(BaseRewardFunction):
            def __call__(self, messages, ground_truth, **kwargs) -> float:
                return float(messages[-1].content.strip() == ground_truth)

    It has the name of its class, or that of ``super().__init__(name)``. `kwargs` holds the prompt's other columns. An
    exception, NaN or anything that is not a number marks the episode as failed; a wrong answer of the model is an ordinary
    low score. ``__call__`` may be async: then all episodes of a batch are scored at once.

    With ``per_turn = True`` the score is a list, a number for each assistant message after the prompt. What turns earn adds
    to the episode's reward beside the terminal ones, and algorithms with turn-level credit give each turn its own.

    A batch that takes longer than `score_timeout_s` marks its episodes as failed too. Therefore the reward runs in a
    separate thread; one that must run in the main thread, such as one that sets signals, needs ``score_timeout_s = None``.

    `success_at` is the lowest score that is a success, such as 1.0 for a right answer. The default None leaves that open:
    then the reward counts in `reward/...` only. The first reward with a number decides what logs show as `accuracy`.
    """

    score_timeout_s: float | None = 300.0
    per_turn: bool = False
    success_at: float | None = None
    needs_ground_truth: bool = True  # False accepts rows without one, and gets None
    needs_roles: bool = False  # whether it only works where several roles speak in an episode
    rewards_among_options: tuple[str, ...] = ()  # options of the constructor that are rewards themselves
    parts: Sequence[BaseRewardFunction] = ()  # rewards that this one asks; their examples must hold too
    subscores: Sequence[str] = ()  # scores behind its score, logged as NAME/SUBSCORE; they may train too

    def __init__(self, name: str | None = None):
        name = type(self).__name__ if name is None else name
        if not re.fullmatch(r"[a-zA-Z0-9_\-]+", name):
            raise RewardError(f"Reward name {name!r} is not accepted: letters, digits, '_' and '-'.")
        self.name = name

    @abstractmethod
    def __call__(
        self, messages: list[ChatMessage], ground_truth: Any, **kwargs: Any
    ) -> Score | Coroutine[Any, Any, Score]:
        """Return the score of one finished conversation."""

    def score_batch(self, samples: Sequence[SampleState]) -> Sequence[Score | Exception]:
        """Return scores of many conversations, in order; an exception in place of a score fails only that conversation.

        A batch holds the groups that have ended since the last call, each of them whole, while others still play. Calls
        follow one another. Override it if a batch is cheaper than separate calls.
        """
        return awaited([self(sample.messages, sample.ground_truth, **sample.columns) for sample in samples])

    @property
    def score_names(self) -> list[str]:
        """Return the names under which its score and its `subscores` are logged."""
        return [self.name, *(f"{self.name}/{subscore}" for subscore in self.subscores)]

    def subscores_of(self, sample: SampleState) -> Sequence[float]:
        """Return the `subscores` of a sample that `score_batch` has just scored."""
        return ()

    def check_row(self, ground_truth: Any, columns: Mapping[str, Any]) -> None:
        """Raise DataError for a row that the reward cannot score. It is asked for each row before anything starts."""

    def faulty_rows(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[int, str]:
        """Return why rows can be read but not scored fairly, by number. They are named and left out of the run."""
        return {}

    def examples(self) -> Sequence[RewardExample]:
        """Return right and wrong answers with their expected scores; training refuses to start if one differs."""
        return ()

    def close(self) -> None:
        """Release worker processes and the like."""
        for part in self.parts:
            part.close()


class BaseBatchReward(BaseRewardFunction):
    """A reward that scores many conversations together: subclasses define `score_batch`."""

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> Any:
        """Return the score of one finished conversation; raise what `score_batch` has in its place."""
        (score,) = self.score_batch([as_sample(messages, ground_truth, kwargs)])
        if isinstance(score, Exception):
            raise score
        return score

    @abstractmethod
    def score_batch(self, samples: Sequence[SampleState]) -> Sequence[Any]:
        """Return scores of many conversations, in order; an exception in place of a score fails only that conversation."""


def as_sample(messages: Sequence[ChatMessage], ground_truth: Any, columns: Mapping[str, Any]) -> SampleState:
    """Return a finished conversation as a sample; the policy's part begins with the first message of the assistant."""
    sample = SampleState("conversation", 0, list(messages), ground_truth, columns)
    starts = (number for number, message in enumerate(messages) if message.role == "assistant")
    sample.init_msg_size = next(starts, len(messages))
    return sample


def needs_ground_truth(reward: BaseRewardFunction) -> bool:
    """Return whether a reward, or one that it is made of, compares with a ground truth."""
    return any(map(needs_ground_truth, reward.parts)) if reward.parts else reward.needs_ground_truth


def policy_messages(sample: SampleState) -> list[ChatMessage]:
    """Return the assistant messages after the prompt; examples in a few-shot prompt are not the policy's."""
    return [message for message in sample.messages[sample.init_msg_size :] if message.role == "assistant"]


def final_reply(messages: Sequence[ChatMessage]) -> str:
    """Return the text of the last assistant message, "" without one."""
    return next((message.content for message in reversed(messages) if message.role == "assistant"), "")


def policy_tokens(sample: SampleState) -> int:
    """Return the number of tokens that the policy sampled, over all its turns."""
    return sum(len(span.token_ids) for span in sample.policy_spans)


def number_text(value: Any) -> Any:
    """Return a finite number as the text that people write: 42, 0.5, and 2 for 2.0; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        return value
    if isinstance(value, Rational):  # whole numbers of any size
        return str(value)
    return f"{Decimal(str(value)).normalize():f}" if math.isfinite(value) else value
