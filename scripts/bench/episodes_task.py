"""What both sides of `episodes.py` play, and what the mock model says; nothing but the standard library.

Add one to 41, then one to the result. What is it?      increment(41)  42  increment(42)  43  "The answer is 43."
"""

from __future__ import annotations

from collections.abc import Callable

SYSTEM = "Answer the question. Call the tool for every step of it."
TURNS = 3


def question(number: int) -> str:
    """The prompt of a task; no two have the same number."""
    return f"Add one to {number}, then one to the result. What is it?"


def right(number: int) -> str:
    """What the model has to say in the end."""
    return f"The answer is {number + 2}."


def argument(number: int, turn: int) -> int | None:
    """What the model calls the tool with in a turn; None where it answers."""
    return number + turn if turn < TURNS - 1 else None


def scored(said: str, number: int) -> float:
    """The reward: 1 where the last message says the sum."""
    return float(str(number + 2) in said)


async def increment(number: int) -> int:
    """Add one.

    Args:
        number: to which one is added.
    """
    return number + 1


def plain_tool() -> Callable[[int], int]:
    """The same tool as a function that is not async."""

    def increment(number: int) -> int:
        """Add one.

        Args:
            number: to which one is added.
        """
        return number + 1

    return increment
