"""What runs in a math worker: two answers, are they the same number, set, interval, expression, ...?

Loaded by path inside a verifier process (`rl4llm.rewards.pool`); never import it in the trainer.
"""

from __future__ import annotations

import logging
from typing import Any

import sympy.core.random
from math_verify import parse, verify

# It would warn that its time limits are off; the parent has them.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def same_answer(gold: str, answer: str) -> bool:
    """Return whether math-verify considers `answer` equal to `gold`, both LaTeX or plain text without the box."""
    sympy.core.random.seed(0)  # sympy tests equality at random points; equal questions must get equal answers
    return bool(verify(_parsed(gold), _parsed(answer), timeout_seconds=None))


def _parsed(text: str) -> list[Any]:
    return parse(f"\\boxed{{{text}}}", parsing_timeout=None)
