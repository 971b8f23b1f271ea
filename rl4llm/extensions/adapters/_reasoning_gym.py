"""Make problems of reasoning-gym and score answers with its verifiers, inside a worker process.

Loaded by path inside verifier processes (`rl4llm.rewards.pool`); never import it in the trainer. Several tasks build
their problems in the order of a set, so the pool fixes Python's hash seed. Some verifiers evaluate an answer as Python:
an answer that could call anything is never passed to one of these.
"""

from __future__ import annotations

import ast
import cmath
import dataclasses
import inspect
import json
import random
import re
import sys
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

FUNCTIONS = ("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln",
             "sqrt", "Abs", "erf")  # fmt: skip
"""Functions that a mathematical answer may call."""
EVALUATES = ("eval(", "parse_expr(", "sympify(")
CHUNK = 500  # problems of one dataset: some tasks make all of them at once


def problem(task: str, options: str, number: int) -> dict[str, Any]:
    """Return `question` and `answer` of problem `number` of a task; `options` is JSON. Some tasks have no answer.

    For an unknown task, return the names of all tasks as `known`. For an option that the task does not have, return
    `option` and `accepted`.
    """
    if task not in DATASETS:
        return {"known": sorted(DATASETS)}
    accepted = {item.name for item in dataclasses.fields(DATASETS[task][1])} - {"size"}
    if other := sorted(json.loads(options).keys() - accepted - {"seed"}):
        return {"option": other[0], "accepted": sorted(accepted - {"seed"})}
    entry = _problem(task, options, number)
    return {"question": entry["question"], "answer": entry["answer"]}


def score(task: str, options: str, number: int, question: str, answer: str) -> float | None:
    """Return the score of the task's verifier, 0 to 1, or None if this process makes a different problem for the
    number.

    Raises ValueError if the task evaluates answers and the answer calls a function.
    """
    entry = _problem(task, options, number)
    if entry["question"] != question:
        return None
    if _evaluates(task) and calls_something(answer):
        raise ValueError("the answer calls a function, which this task's verifier would run")
    if _is_nan(answer) and answer != entry["answer"]:
        return 0.0  # its distance from the answer is below any other
    random.seed(0)
    return float(_dataset(task, options, number // CHUNK).score_answer(answer, entry))


def _is_nan(answer: str) -> bool:
    """Return whether a verifier could read an answer as a number, real or complex, that is NaN."""
    try:
        return cmath.isnan(complex(re.sub(r"[\s()]", "", answer.lower()).replace("i", "j")))
    except ValueError:
        return False


def calls_something(answer: str) -> bool:
    """Return whether evaluating `answer` could run anything but arithmetic.

    An answer without a bracket calls nothing. With one, it must be an expression of numbers, names, sequences and
    `FUNCTIONS`. Strings are refused, since sympy would evaluate them in turn, and so are attributes.
    """
    if "(" not in answer:
        return False
    try:
        nodes = list(ast.walk(ast.parse(answer.strip(), mode="eval")))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return True
    return not all(_is_plain(node) for node in nodes)


_PLAIN = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Name,
    ast.Load,
    ast.List,
    ast.Tuple,
)


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
    """Return whether the module of a task may evaluate strings."""
    source = inspect.getsource(sys.modules[DATASETS[task][0].__module__])
    return any(call in source for call in EVALUATES)
