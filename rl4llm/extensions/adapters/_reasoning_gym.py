"""Make problems of reasoning-gym and score answers with its verifiers, inside a worker process or the sandbox.

Loaded by path inside verifier processes (`rl4llm.rewards.pool`), and sent to the sandbox as text; never import it in the
trainer. Several tasks build their problems in the order of a set, so both fix Python's hash seed. Some verifiers evaluate
an answer as Python. The interpreter reports each such evaluation, however the text was hidden. Outside the sandbox only
literals are evaluated. Inside it only mathematics is, since other code could forge its own verdict.
"""

from __future__ import annotations

import cmath
import gc
import json
import math
import os
import random
import re
import resource
import select
import signal
import sys
from functools import lru_cache
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import reasoning_gym

MATHEMATICS = {
    "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt",
    "Abs", "erf", "factorial", "factorial2", "pi", "oo", "Integer", "Float", "Rational", "Symbol",
}  # fmt: skip
"""Names that an evaluated answer may use beside single letters. sympy puts some of them around its numbers and letters."""
EVALUATES = "evaluates"
CHUNK = 500  # problems of one dataset: some tasks make all of them at once
PROBES = 20  # problems whose answers a verifier gets in place of others
PATIENCE = 10  # time limits of processor time that an answer may take on a busy machine

_watch: SimpleNamespace | None = None  # what the verifier may evaluate, while it scores an answer


def problem(task: str, options: str, number: int) -> dict[str, Any]:
    """Return `question` and `answer` of problem `number` of a task; `options` is JSON. Some tasks have no answer.

    `evaluates` tells whether the verifier evaluates this answer, and `blind` whether it pays those of other problems."""
    entry = _problem(task, options, number)
    text = _text(entry["answer"])
    return {
        "question": entry["question"],
        "answer": entry["answer"],
        "evaluates": score(task, options, number, entry["question"], text, sandboxed=False) == EVALUATES,
        "blind": _is_blind(task, options),
    }


def score(
    task: str, options: str, number: int, question: str, answer: str, sandboxed: bool = True
) -> float | str | None:
    """Return the score of the task's verifier, 0 to 1, or None if this process makes a different problem for the
    number.

    Return EVALUATES if the verifier would evaluate more than a literal outside the sandbox. A text that is more than
    mathematics is evaluated nowhere: the verifier gets a ValueError, as for one that is invalid.
    """
    global _watch
    entry = _problem(task, options, number)
    if entry["question"] != question:
        return None
    if _is_blind(task, options) or (_is_nan(answer) and answer != entry["answer"]):
        return 0.0  # the distance of NaN from the answer is below any other
    random.seed(0)
    verifier = _dataset(task, options, number // CHUNK)
    _watch = watch = SimpleNamespace(sandboxed=sandboxed, evaluates=False)
    try:
        value = float(verifier.score_answer(answer, entry))
    except Exception:
        if not watch.evaluates:
            raise
    finally:
        _watch = None
    return EVALUATES if watch.evaluates else value


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Stop the evaluation of a text that may not be evaluated here; an import runs the code of a library."""
    if event != "exec" or _watch is None or _is_importing():
        return
    code = arguments[0]
    names = {*code.co_names, *(part.co_name for part in code.co_consts if isinstance(part, CodeType))}
    # sympy itself evaluates "from sympy import *", and generates functions of monomials
    names = {name for name in names if name != "sympy" and not name.startswith("monomial_")}
    harmful = any(len(name) > 1 and name not in MATHEMATICS for name in names)  # also <lambda> and <listcomp>
    if harmful or (names and not _watch.sandboxed):
        _watch.evaluates |= not harmful
        raise ValueError("the answer is code, which is not evaluated")


sys.addaudithook(_audit)


def _is_importing() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not score.__code__:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def score_each(timeout_s: float, memory_bytes: int) -> None:
    """Score the tasks that standard input has as JSON, each in a separate process, and write the verdicts as JSON.

    A verdict is a score, or "timeout" or "crash" with the reason.
    """
    tasks = json.load(sys.stdin)
    gc.freeze()  # a collection in a process would copy the pages that it shares
    verdicts = [_verdict(task, timeout_s, memory_bytes) for task in tasks]
    sys.stdout.write(f"\n{json.dumps(verdicts)}\n")


def _verdict(task: tuple[str, str, int, str, str], timeout_s: float, memory_bytes: int) -> Any:
    _problem(*task[:3]), _is_blind(*task[:2])  # the forked process finds them made
    result, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some verifiers print
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(timeout_s), math.ceil(timeout_s) + 1))
        try:
            verdict: Any = score(*task)
        except Exception as error:  # noqa: BLE001 - what the verifier makes of the model's text is a result
            verdict = "crash", f"{type(error).__name__}: {str(error)[:500]}"
        os.write(writer, json.dumps(verdict).encode())
        os._exit(0)
    os.close(writer)
    text = os.read(result, 4096) if select.select([result], [], [], PATIENCE * timeout_s)[0] else b""
    os.close(result)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return json.loads(text) if text else ("timeout", f"took more than {timeout_s:g} s, or ended the process")


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else "no answer"


@lru_cache(maxsize=64)
def _is_blind(task: str, options: str) -> bool:
    """Return whether the verifier pays each problem's answer in full for another problem, whose answer differs."""
    paid = 0
    for number in range(1, PROBES):
        entry, neighbour = _problem(task, options, number - 1), _problem(task, options, number)
        if entry["answer"] == neighbour["answer"] is not None:
            continue
        try:
            if _dataset(task, options, 0).score_answer(_text(neighbour["answer"]), entry) < 1:
                return False
        except Exception:  # noqa: BLE001 - the answer of another problem may be any text to this one
            return False
        paid += 1
    return paid > 2


def _is_nan(answer: str) -> bool:
    """Return whether a verifier could read an answer as a number, real or complex, that is NaN."""
    try:
        return cmath.isnan(complex(re.sub(r"[\s()]", "", answer.lower()).replace("i", "j")))
    except ValueError:
        return False


@lru_cache(maxsize=64)
def _dataset(task: str, options: str, chunk: int) -> Any:
    settings = json.loads(options)
    return reasoning_gym.create_dataset(
        task, size=CHUNK, **settings | {"seed": settings["seed"] + chunk * CHUNK}
    )


@lru_cache(maxsize=8192)
def _problem(task: str, options: str, number: int) -> dict[str, Any]:
    return _dataset(task, options, number // CHUNK)[number % CHUNK]
