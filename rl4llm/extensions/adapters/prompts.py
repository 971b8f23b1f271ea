"""What the prompts of adapters have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl4llm.core.errors import ConfigError, unknown
from rl4llm.runtime.seeds import derive_seed

SPLITS = ("train", "test")


def check_split(split: str) -> None:
    """Raise ConfigError for a split that would otherwise be a second name of another one."""
    if split not in SPLITS:
        raise ConfigError(unknown("data.split", split, SPLITS))


def seeds_of(split: str, count: int, *parts: Any) -> list[int]:
    """Return `count` seeds, derived from `parts`; the other split has none of them."""
    check_split(split)
    return [derive_seed(*parts, number) % 2**30 * 2 + (split == "test") for number in range(count)]


def prompt_row(
    prompt_id: str, system: str | None, messages: Sequence[Mapping[str, Any]], **columns: Any
) -> dict[str, Any]:
    """Return a row with these messages after a `system` message, unless that is empty, and no ground truth."""
    head = [{"role": "system", "content": system}] if system else []
    return {"prompt_id": prompt_id, "messages": [*head, *messages], "ground_truth": None, **columns}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
