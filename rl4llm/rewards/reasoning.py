"""The reward of the library reasoning-gym: each task's own verifier."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction, SampleState
from rl4llm.core.errors import DataError
from rl4llm.core.types import ChatMessage
from rl4llm.rewards.pool import Fault, RewardFailure, Unavailable, VerifierPool
from rl4llm.rewards.registry import register_reward
from rl4llm.rewards.replies import as_sample, final_reply, policy_messages

VERIFIER = Path(__file__).with_name("_reasoning_gym.py")
COLUMN = "reasoning"
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@register_reward("reasoning_gym")
class ReasoningReward(BaseRewardFunction):
    """What the verifier of a prompt's task gives to the text in the last ``<answer>...</answer>`` of the last reply.

    Verifiers run in worker processes with a time limit. 0.0 that is no verdict leaves its reason in
    ``sample.extras["reward_notes"][name]``: no_answer, refused (too long), timeout or crash (of the verifier, or because
    an answer was to be evaluated that calls functions). A sample fails where no worker can be started.

    Args:
        name: under which the score is logged.
        workers: verifier processes.
        timeout_s: time limit of one answer.
        memory_bytes: address space of one worker.
        max_answer_chars: longer answers score 0.0 unread.
    """

    def __init__(
        self,
        name: str = "reasoning_gym",
        *,
        workers: int = 2,
        timeout_s: float = 5.0,
        memory_bytes: int = 2 * 1024**3,
        max_answer_chars: int = 4000,
    ):
        super().__init__(name)
        self.max_answer_chars = max_answer_chars
        self.pool = VerifierPool(f"{VERIFIER}:score", workers=workers, timeout_s=timeout_s, memory_bytes=memory_bytes)

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> float:
        score = self.score_batch([as_sample(messages, ground_truth, kwargs)])[0]
        if isinstance(score, RewardFailure):
            raise score
        return score

    def score_batch(self, samples: Sequence[SampleState]) -> list[float | RewardFailure]:
        """One score per sample; a RewardFailure stands where no verifier gave one."""
        answers = [self._answer(sample) for sample in samples]
        asked = [i for i, (answer, _) in enumerate(answers) if answer is not None]
        verdicts = self.pool.map([[*_problem(samples[i].columns), answers[i][0]] for i in asked])
        scores: list[float | RewardFailure] = [0.0] * len(samples)
        notes = [note for _, note in answers]
        for i, verdict in zip(asked, verdicts, strict=True):
            scores[i], notes[i] = _grade(verdict)
        for sample, note in zip(samples, notes, strict=True):
            if note:
                sample.extras.setdefault("reward_notes", {})[self.name] = note
        return scores

    def close(self) -> None:
        self.pool.close()

    def _answer(self, sample: SampleState) -> tuple[str | None, str | None]:
        """The answer, or None and why there is none to look at."""
        found = _ANSWER.findall(final_reply(policy_messages(sample)))
        if not found or not found[-1].strip():
            return None, "no_answer"
        answer = found[-1].strip()
        if len(answer) > self.max_answer_chars:
            return None, f"refused: more than {self.max_answer_chars} characters"
        return answer, None


def _problem(columns: Mapping[str, Any]) -> list[Any]:
    try:
        column = columns[COLUMN]
        return [column["task"], column["options"], column["number"], column["question"]]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"A prompt has no column {COLUMN!r} that names a problem of reasoning-gym; it has {sorted(columns)}. "
            "Next step: env.name=reasoning_gym makes such prompts."
        ) from error


def _grade(verdict: Any) -> tuple[float | RewardFailure, str | None]:
    if isinstance(verdict, Unavailable):
        return RewardFailure(verdict.reason), None
    if isinstance(verdict, Fault):
        return 0.0, f"{type(verdict).__name__.lower()}: {verdict.reason}"
    if verdict is None:
        return RewardFailure("the task makes another problem of the same seed and number in another process"), None
    return verdict, None
