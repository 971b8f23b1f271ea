"""Grade the rows of a file with the math reward, and keep what it read in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4llm.core.base_env import SampleState
from rl4llm.core.base_reward import as_sample, final_reply
from rl4llm.core.errors import DataError
from rl4llm.core.types import ChatMessage
from rl4llm.data.columns import messages_in
from rl4llm.data.read import read_rows
from rl4llm.rewards.math import MathReward, accepted_answers
from rl4llm.rewards.pool import RewardFailure


@dataclass(frozen=True, slots=True)
class Graded:
    """What the reward read in a row. `score` is None for a row that was not graded, and `note` is the reason of both."""

    row: str
    score: float | None
    extracted: list[str]
    ground_truth: list[str]
    note: str | None


def grade(file: str, reply: str | None, answer: str, reward: MathReward) -> list[Graded]:
    """Grade each row of a file: its reply in column `reply` against the ground truth in column `answer`.

    Without `reply`, the reply is in the column reply or messages. A row without a reply or an answer is not graded. Raises
    DataError for a file that cannot be read or has no row to grade.
    """
    rows = [(place, _sample(row, reply, answer)) for place, row in read_rows(file, "train")]
    samples = [sample for _, sample in rows if isinstance(sample, SampleState)]
    if not samples:
        raise DataError(next((f"{place}: {error}" for place, error in rows), f"{file} has no rows."))
    scores = iter(reward.score_batch(samples))
    return [
        _graded(place, sample, next(scores), reward)
        if isinstance(sample, SampleState)
        else Graded(place, None, [], [], str(sample))
        for place, sample in rows
    ]


def counts(rows: Sequence[Graded]) -> str:
    """Return a line such as "3 rows: 1 scored 1, 1 scored 0 (1 no_answer), 1 not graded"."""
    scored = Counter(row.score for row in rows)
    why = Counter(row.note.partition(":")[0] for row in rows if row.score == 0 and row.note)
    reasons = ", ".join(f"{count} {note}" for note, count in why.most_common())
    zeros = f"{scored[0.0]} scored 0" + (f" ({reasons})" if reasons else "")
    return f"{len(rows)} rows: {scored[1.0]} scored 1, {zeros}, {scored[None]} not graded"


def _sample(row: Any, reply: str | None, answer: str) -> SampleState | DataError:
    """Return the reply of a row as a sample whose ground truth can be read, or what is wrong with the row."""
    if not isinstance(row, Mapping):
        return DataError(f"{row!r:.100} is not an object with columns.")
    column = reply or ("messages" if "reply" not in row and "messages" in row else "reply")
    for name in (column, answer):
        if name not in row:
            return DataError(f"The column {name!r} is missing. Next: set --reply-column or --answer-column.")
    try:
        accepted_answers(row[answer])
        return as_sample(_messages(row[column], column), row[answer], {})
    except DataError as error:
        return error


def _messages(cell: Any, column: str) -> list[ChatMessage]:
    cell = messages_in(cell, column)
    items = [{"role": "assistant", "content": cell}] if isinstance(cell, str) else cell
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise DataError(f"{column}={cell!r:.100} is neither a string nor a list of messages.")
    messages = [ChatMessage.from_dict(item) for item in items]
    if all(message.role != "assistant" for message in messages):
        raise DataError(f"{column} has no message of the assistant.")
    return messages


def _graded(place: str, sample: SampleState, score: float | RewardFailure, reward: MathReward) -> Graded:
    extracted, _ = reward.answers_in(final_reply(sample.messages))
    golds = accepted_answers(sample.ground_truth)
    if isinstance(score, RewardFailure):
        return Graded(place, None, extracted, golds, f"failed: {score}")
    return Graded(place, score, extracted, golds, sample.extras.get("reward_notes", {}).get(reward.name))
