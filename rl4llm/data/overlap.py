"""Which held-out prompts the training data has too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl4llm.core.images import Picture
from rl4llm.data.load import Rows

Dataset = Sequence[Mapping[str, Any]]


def overlap_warnings(
    training: Dataset, held_out: Dataset, where: str, *, answered: bool = False
) -> list[str]:
    """Return a warning that counts the held-out rows whose prompt a training row has; [] if there are none.

    Prompts are compared by their roles, texts and images, never by ids. If `answered`, the messages end with the answer of
    the assistant, which is not compared. Only a hash of 64 bits is kept of each held-out prompt. Prompts that an environment
    made are not compared, since other columns may tell them apart.
    """
    if not isinstance(training, Rows) or not isinstance(held_out, Rows):
        return []
    prompts = list(_hashes(held_out, answered))
    hashes = set(prompts)
    seen = {found for found in _hashes(training if hashes else (), answered) if found in hashes}
    count = sum(prompt in seen for prompt in prompts)
    if not count:
        return []
    return [
        f"{where}: {count:,} of {len(prompts):,} held-out prompts are also in the training data, so their results do not "
        "show what was learned for new ones. Next: remove them from one of the two."
    ]


def _hashes(rows: Dataset, answered: bool) -> Iterator[int]:
    for row in rows:
        messages = row["messages"]
        if answered:
            spoke = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            messages = messages[: spoke[-1]] if spoke else messages
        yield hash(tuple(_said(message) for message in messages))


def _said(message: Mapping[str, Any]) -> tuple[Any, ...]:
    pictures = (part for part in message.get("parts") or () if isinstance(part, Picture))
    return message["role"], str(message["content"] or "").strip(), *pictures
