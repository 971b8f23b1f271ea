"""Reward functions of verl, which work unchanged."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import checked
from rl4llm.core.types import ChatMessage


class ComputeScore(BaseRewardFunction):
    """Call a function that verl calls, ``compute_score(data_source, solution_str, ground_truth, extra_info)``.

        rewards: [{name: compute_score, path: my_reward.py}]

    `data_source` and `extra_info` are the prompt's columns of these names. A result with the key `score` counts with that.
    The function may be async: then all episodes of a batch are scored at once.

    Args:
        name: under which the score is logged.
        path: the Python file, relative to the working directory.
        function: the function in it.
    """

    @checked("rewards.{name}")
    def __init__(self, name: str = "compute_score", *, path: str, function: str = "compute_score"):
        super().__init__(name)
        self.function = _function(name, Path(path), function)
        self.accepted = inspect.signature(self.function).parameters
        if "solution_strs" in self.accepted:
            raise ConfigError(
                f"rewards.{name}: {function} of {path} scores a batch. Accepted: data_source, solution_str, ground_truth, "
                "extra_info."
            )

    def __call__(
        self, messages: list[ChatMessage], ground_truth: Any, **columns: Any
    ) -> float | Coroutine[Any, Any, float]:
        said = [message.content for message in messages if message.role == "assistant"]
        given = {
            "data_source": columns.get("data_source"),
            "solution_str": "\n".join(said),
            "ground_truth": ground_truth,
            "extra_info": columns.get("extra_info"),
        }
        takes_any = any(item.kind is item.VAR_KEYWORD for item in self.accepted.values())
        found = self.function(
            **{key: value for key, value in given.items() if takes_any or key in self.accepted}
        )
        return _later(found) if inspect.isawaitable(found) else _score(found)


async def _later(found: Awaitable[Any]) -> float:
    """Await a score."""
    return _score(await found)


def _score(found: Any) -> float:
    return float(found["score"] if isinstance(found, dict) else found)


def _function(name: str, path: Path, function: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"rewards.{name}.path={str(path)!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Any = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"rewards.{name}: {path} has no function {function!r}.")
    return found
