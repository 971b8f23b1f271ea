"""TRL's `tools` and `environment_factory`: an environment whose tools are functions, or the methods of an object."""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch

from rl4llm.core.base_env import LLM, EnvState, SampleState
from rl4llm.core.errors import ConfigError, EnvError
from rl4llm.core.types import SamplingParams
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.envs.tools.tool import Functions, Tool, ToolSet, as_tool
from rl4llm.runtime.raised import raised
from rl4llm.runtime.runner import in_caller

INSTANCE = "environment"
"""Where a sample's extras hold its object until it is scored."""

PLACEHOLDER = "(what reset returns)"
ROWS = [{"prompt": [{"role": "user", "content": PLACEHOLDER}]}]
"""The dataset of a script without one: its environment's `reset` returns the prompts."""

MANY = 16  # calls of a turn, and turns, where TRL has no limit


class Instance:
    """Hold the object that a factory made for an episode."""

    def __init__(self, made: Any):
        self.made = made

    def __repr__(self) -> str:
        return type(self.made).__name__


class Methods(ToolSet):
    """The public methods of an environment's object, except `reset` and `get_reward`, as tools."""

    def __init__(self, made: Any, tools: dict[str, Tool] | None = None):
        if tools is None:
            public = [
                name for name, _ in inspect.getmembers(made, inspect.ismethod) if not name.startswith("_")
            ]
            tools = {
                name: as_tool(getattr(made, name)) for name in public if name not in ("reset", "get_reward")
            }
        self.tools = {name: replace(tool, function=getattr(made, name)) for name, tool in tools.items()}

    def open(self, sample: SampleState) -> Self:
        return type(self)(sample.extras[INSTANCE].made, dict(self.tools))

    def close(self) -> None:
        """Do nothing: the object is scored after its episode."""


class ScriptEnv(ToolMDPEnv):
    """The environment of a script: `functions` and the methods of what `factory` makes are tools.

    The model sees the errors of tools, and a call that it repeats is no failure, as with TRL.
    """

    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    factory: ClassVar[Callable[[], Any] | None] = None

    def __init__(self, *args: Any, max_steps: int = MANY, **kwargs: Any):
        tools: list[ToolSet] = [Functions(*map(_callable, self.functions))] if self.functions else []
        if type(self).factory is not None:
            tools.append(Methods(_made(type(self).factory)))
        super().__init__(*args, tools=tools, max_calls=MANY, on_error="answer", max_steps=max_steps, **kwargs)

    @torch.inference_mode()
    def _run_interaction_loop(
        self, env_state: EnvState, llm: LLM, sampling_params: SamplingParams, **kwargs: Any
    ) -> EnvState:
        for sample in env_state.sample_states if type(self).factory is not None else ():
            self._reset(sample)
        return super()._run_interaction_loop(env_state, llm, sampling_params, **kwargs)

    def end_episode(self, sample: SampleState) -> list[Future[None]]:
        if sample.failure is not None:
            sample.extras.pop(INSTANCE, None)
        return super().end_episode(sample)

    def _reset(self, sample: SampleState) -> None:
        """Make the object of a sample; what its `reset` returns is added to the prompt."""
        made = _made(type(self).factory)
        prompt = [message.to_dict() for message in sample.messages]
        try:
            seen = made.reset(**{"prompt": prompt, **sample.columns})
        except Exception as error:
            raise EnvError(raised(f"{type(made).__name__}.reset", error)) from error
        if seen is not None and not isinstance(seen, str):
            raise EnvError(f"{type(made).__name__}.reset must return a string or None, not {seen!r:.100}")
        sample.extras[INSTANCE] = Instance(made)
        sample.special = replace(sample.special, own_prompt=True)
        last = sample.messages[-1]
        text = "" if last.content == PLACEHOLDER else last.content
        sample.messages[-1] = replace(last, content=text + (seen or ""))


def script_env(functions: Sequence[Callable[..., Any]], factory: Callable[[], Any] | None) -> type[ScriptEnv]:
    """Return the environment class of a script's tools and factory."""
    names = [
        getattr(item, "__qualname__", type(item).__name__) for item in (*functions, *filter(None, [factory]))
    ]
    fixed = None if factory is None else staticmethod(factory)
    return type(
        f"ScriptEnv({', '.join(names)})", (ScriptEnv,), {"functions": tuple(functions), "factory": fixed}
    )


def _made(factory: Any) -> Any:
    try:
        made = factory()
    except Exception as error:
        raise EnvError(raised("environment_factory", error)) from error
    if not callable(getattr(made, "reset", None)):
        raise ConfigError(
            f"environment_factory makes a {type(made).__name__}, which has no method `reset`. Add one."
        )
    return made


def _callable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that uses signals, which only the main thread may set, as one that runs there."""
    uses_signals = getattr(function, "__globals__", {}).get("signal") is signal
    if not uses_signals or inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    async def in_main_thread(*args: Any, **kwargs: Any) -> Any:
        return await in_caller(lambda: function(*args, **kwargs))

    return in_main_thread
