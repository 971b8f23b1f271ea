"""A calculator for models, which parses expressions with Python's syntax tree and evaluates no code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction

from rl4llm.envs.tools.tool import ToolError

MAX_LENGTH = 200  # characters of an expression
MAX_DIGITS = 60  # of any intermediate number

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses, for example "(37+48)*3".
    """
    if not isinstance(expression, str) or not expression.strip():
        raise ToolError("expression must be a text such as '37+48'")
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression is longer than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"cannot read {expression!r}") from None
    value = _value(tree.body)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and node.value in (math.inf, -math.inf):
        raise ToolError("the numbers are too large")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Div) and right == 0:
            raise ToolError("division by zero")
        value = _BINARY[type(node.op)](left, right)
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_value(node.operand))
    else:
        raise ToolError("only numbers, + - * / and parentheses are allowed")
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ToolError("the numbers are too large")
    return value
