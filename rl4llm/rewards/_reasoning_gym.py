"""What runs in a worker for reasoning-gym: its problems, and what its verifiers say of answers to them.

Loaded by path inside verifier processes (`rl4llm.rewards.pool`); never import it in the trainer. Several tasks make their
problems in the order of a set, which is why the pool fixes Python's hashes. Some verifiers evaluate an answer as Python: an
answer that could call anything is never shown to one.
"""

from __future__ import annotations

import ast
import inspect
import json
import random
import sys
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

FUNCTIONS = ("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln",
             "sqrt", "Abs", "erf")  # fmt: skip
"""What an answer in mathematics may call."""
EVALUATES = ("eval(", "parse_expr(", "sympify(")
CHUNK = 500  # problems of one dataset: some tasks make all of them at once


def problem(task: str, options: str, number: int) -> dict[str, Any]:
    """`question` and `answer` of problem `number` of a task, whose `options` are JSON; some tasks know no answer.

    For a task that is not there it is the names of those that are, `known`.
    """
    if task not in DATASETS:
        return {"known": sorted(DATASETS)}
    entry = _problem(task, options, number)
    return {"question": entry["question"], "answer": entry["answer"]}


def score(task: str, options: str, number: int, question: str, answer: str) -> float | None:
    """What the task's own verifier gives an answer, 0 to 1; None where this process makes another problem of the number."""
    entry = _problem(task, options, number)
    if entry["question"] != question:
        return None
    if _evaluates(task) and calls_something(answer):
        raise ValueError("the answer calls a function, and this task's verifier would run it")
    random.seed(0)
    return float(_dataset(task, options, number // CHUNK).score_answer(answer, entry))


def calls_something(answer: str) -> bool:
    """Whether evaluating `answer` could run anything but arithmetic.

    Without a bracket nothing is called. With one, it must be an expression of numbers, names, sequences and `FUNCTIONS`,
    without texts, which sympy would evaluate in turn, and without attributes.
    """
    if "(" not in answer:
        return False
    try:
        nodes = list(ast.walk(ast.parse(answer.strip(), mode="eval")))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return True
    return not all(_is_plain(node) for node in nodes)


_PLAIN = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Name, ast.Load, ast.List, ast.Tuple)


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    return isinstance(node, _PLAIN)


@lru_cache(maxsize=64)
def _dataset(task: str, options: str, chunk: int) -> Any:
    given = json.loads(options)
    return reasoning_gym.create_dataset(task, size=CHUNK, **given | {"seed": given["seed"] + chunk * CHUNK})


@lru_cache(maxsize=8192)
def _problem(task: str, options: str, number: int) -> dict[str, Any]:
    return _dataset(task, options, number // CHUNK)[number % CHUNK]


@lru_cache(maxsize=64)
def _evaluates(task: str) -> bool:
    """Whether the module of a task evaluates texts; it is enough that it might."""
    source = inspect.getsource(sys.modules[DATASETS[task][0].__module__])
    return any(call in source for call in EVALUATES)
