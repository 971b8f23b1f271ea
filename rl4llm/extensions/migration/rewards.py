"""Rewards of other projects, which work unchanged."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import checked
from rl4llm.core.types import ChatMessage


class BaseReward(BaseRewardFunction):
    """A reward as RL-MAX has it: `score` of a prompt and a completion, both strings.

        @register_reward
        class Short(BaseReward):
            name: str = "short"
            max_value: float = 100.0

            def score(self, prompt, completion, metadata) -> float:
                return 100.0 - len(completion)

    Scores are clamped to `min_value` and `max_value`, and scaled to 0 to 1. `metadata` holds the prompt's other columns,
    with its `ground_truth`. Subclasses may override the three numbers, as may options of a configuration.
    """

    name: str = ""
    weight: float = 1.0
    min_value: float = 0.0
    max_value: float = 1.0

    def __init__(self, name: str | None = None, **numbers: float):
        super().__init__(name or type(self).name or type(self).__name__)
        if inspect.iscoroutinefunction(self.score):
            raise ConfigError(
                f"{self.name}: the method `score` is async. Accepted: a plain method. Next: subclass BaseRewardFunction, "
                "whose `__call__` may be async."
            )
        for key, value in numbers.items():
            if key not in ("weight", "min_value", "max_value"):
                raise ConfigError(
                    f"{self.name}: the option {key!r} is unknown. Known: weight, min_value, max_value."
                )
            setattr(self, key, value)

    def score(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        """Return the raw score of a completion."""
        raise NotImplementedError

    def normalized_score(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        """Return the score, clamped and scaled to 0 to 1."""
        raw = max(self.min_value, min(self.max_value, self.score(prompt, completion, metadata)))
        width = self.max_value - self.min_value
        return (raw - self.min_value) / width if width else 0.0

    def __call__(self, messages: list[ChatMessage], ground_truth: Any, **columns: Any) -> float:
        prompt, completion = _texts(messages)
        return self.weight * self.normalized_score(
            prompt, completion, columns | {"ground_truth": ground_truth}
        )


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
        given = {
            "data_source": columns.get("data_source"),
            "solution_str": _texts(messages)[1],
            "ground_truth": ground_truth,
            "extra_info": columns.get("extra_info"),
        }
        takes_any = any(item.kind is item.VAR_KEYWORD for item in self.accepted.values())
        found = self.function(
            **{key: value for key, value in given.items() if takes_any or key in self.accepted}
        )
        return _later(found) if inspect.isawaitable(found) else _score(found)


async def _later(found: Awaitable[Any]) -> float:
    return _score(await found)


def _score(found: Any) -> float:
    return float(found["score"] if isinstance(found, dict) else found)


def _texts(messages: Sequence[ChatMessage]) -> tuple[str, str]:
    """Return what was asked before the first answer, and all that the policy said."""
    first = next((at for at, message in enumerate(messages) if message.role == "assistant"), len(messages))
    asked = [message.content for message in messages[:first]]
    said = [message.content for message in messages[first:] if message.role == "assistant"]
    return "\n".join(asked), "\n".join(said)


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
