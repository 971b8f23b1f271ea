"""What runs in a math worker: two answers, are they the same number, set, interval, expression, ...?

Loaded by path inside a verifier process (`rl4llm.rewards.pool`); never import it in the trainer.
"""

from __future__ import annotations

import logging
from typing import Any

import sympy.core.random
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr, FiniteSet, Float, MatrixBase, Max, Tuple, UnevaluatedExpr

EXACT_DIGITS = 30
ROUNDED_DIGITS = 5

# It would warn that its time limits are off; the parent has them.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def same_answer(gold: str, answer: str) -> bool:
    """Return whether math-verify considers `answer` equal to `gold`, both LaTeX or plain text without the box.

    math-verify takes numbers for equal that differ by less than a millionth, so numbers are compared by their digits too.
    """
    sympy.core.random.seed(0)  # sympy tests equality at random points; equal questions must get equal answers
    left, right = _parsed(gold), _parsed(answer)
    return bool(verify(left, right, timeout_seconds=None)) and not _differ(left[0], right[0])


def _parsed(text: str) -> list[Any]:
    """Return what is read as a whole, then the text; by default math-verify takes a number out of what it cannot read."""
    return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)


def _differ(one: Any, other: Any) -> bool:
    """Return whether two numbers, or any two in lists of the same order, differ in their first digits."""
    if isinstance(one, MatrixBase) and isinstance(other, MatrixBase):
        return any(map(_differ, one, other))
    if isinstance(one, Tuple | FiniteSet) and isinstance(other, Tuple | FiniteSet):
        ordered = isinstance(one, Tuple) and isinstance(other, Tuple)
        return ordered and any(map(_differ, one.args, other.args))
    if not (isinstance(one, Expr) and isinstance(other, Expr)) or one.free_symbols or other.free_symbols:
        return False
    if one.has(UnevaluatedExpr) or other.has(UnevaluatedExpr):  # percent signs
        return False
    value, other_value = (side.evalf(EXACT_DIGITS) for side in (one, other))
    digits = ROUNDED_DIGITS if one.has(Float) or other.has(Float) else EXACT_DIGITS - 10
    try:
        return bool(abs(value - other_value) > Float(10) ** -digits * Max(abs(value), abs(other_value)))
    except TypeError:  # not a number after all, such as a limit that does not exist
        return False
