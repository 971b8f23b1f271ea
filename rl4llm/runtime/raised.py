"""Report what user code raised, with the line that its author can fix."""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from rl4llm.core.errors import RL4LLMError
from rl4llm.core.message import shortened
from rl4llm.core.redact import redacted_text
from rl4llm.runtime.terminal import notebook_shell

MAX_CHARS = 500  # of an error's text
logger = logging.getLogger("rl4llm.raised")
_NOT_USERS = tuple(
    os.path.join(path, "")
    for path in (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib")))
)
_PACKAGES = {"site-packages", "dist-packages"}
_shown: set[str] = set()


def raised(what: str, error: BaseException, function: Any = None) -> str:
    """Say that `what` raised an error, and name the innermost line of the user's own code, or where `function` begins.

        reward 'exact' raised KeyError: 'A' (my_rewards.py:12)

    Secrets in the error text, such as a key in an address, are hidden.
    If the logger ``rl4llm`` has the level DEBUG, as with ``rl4llm --debug``, the traceback is logged once per line.
    """
    says = shortened(redacted_text(str(error)[: 2 * MAX_CHARS]), MAX_CHARS)
    line, text = _line(error, function), f"{what} raised {type(error).__name__}: {says}"
    if logger.isEnabledFor(logging.DEBUG) and (key := f"{type(error).__name__} {line}") not in _shown:
        _shown.add(key)
        logger.warning("%s\n%s", text, redacted_text("".join(traceback.format_exception(error)).rstrip()))
    return f"{text} ({line})" if line else text


def kind_and_line(error: BaseException) -> str:
    """Name the type of an error and its line, short enough for the name of a metric: ``KeyError at my_rewards.py:12``."""
    line = _line(error)
    return f"{type(error).__name__} at {os.path.basename(line)}" if line else type(error).__name__


def _line(error: BaseException, function: Any = None) -> str:
    """Return ``file:line`` of the innermost frame of the user's code, and ``In[5]:line`` for a cell of a notebook.

    Without such a frame, return where the user's `function` begins, which does not take the arguments of the call. Without
    one, return the innermost frame of all, or nothing for an error that this library raised on purpose.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [(path, line) for path, line in frames if _is_users(path)]
    if not users and (place := place_of(function)):
        return place
    if not users and isinstance(error, RL4LLMError):
        return ""
    return _place(*next(reversed(users or frames), ("", 0)))


def place_of(function: Any) -> str:
    """Return ``file:line`` of a function or method of the user; "" for anything else."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return _place(code.co_filename, code.co_firstlineno) if code and _is_users(code.co_filename) else ""


def line_of(cls: type, names: Sequence[str]) -> str:
    """Return ``file:line`` of a method in the user's part of a class, of one of `names` if there is one; "" without any."""
    members = (member for base in cls.__mro__ for member in vars(base).values())
    codes = [
        member.__code__
        for member in members
        if isinstance(member, FunctionType) and member.__name__[0] != "_"
    ]
    users = [code for code in codes if _is_users(code.co_filename)]
    users.sort(key=lambda code: names.index(code.co_name) if code.co_name in names else len(names))
    return _place(users[0].co_filename, users[0].co_firstlineno) if users else ""


def _is_users(path: str) -> bool:
    path = _absolute(path)
    return not path.startswith(("<frozen ", *_NOT_USERS)) and not _PACKAGES.intersection(Path(path).parts)


def _absolute(path: str) -> str:
    return os.path.abspath(path) if path and path[0] != "<" else path


def _place(path: str, line: int) -> str:
    cell = _cell(path := _absolute(path)) or path.removeprefix(os.path.join(os.getcwd(), ""))
    return f"{cell}:{line}" if path else ""


def _cell(path: str) -> str:
    """Return the label of the notebook's cell whose code has this path, which is temporary; "" for other paths."""
    shell = notebook_shell()
    label = shell.compile.format_code_name(path) if shell is not None else None
    return label[1] if label else ""
