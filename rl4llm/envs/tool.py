"""Tool use: the policy writes tool calls, the environment runs them and answers with tool messages."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils import get_json_schema

from rl4llm.core.base_env import BaseMDPEnv, SampleState
from rl4llm.core.types import ChatMessage
from rl4llm.envs.registry import register_env
from rl4llm.envs.tools import TOOLS

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@register_env("tool")
class ToolMDPEnv(BaseMDPEnv):
    """Runs the calls of each turn, in the Hermes and Qwen format, until a turn has none.

        <tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>

    What the model got wrong (a malformed call, an unknown tool, arguments the tool does not take, a tool that raises) is
    answered with a short error that it can learn from. A tool that exceeds its deadline fails the sample.

    Args:
        tools: typed Python functions with a docstring, plain or async, or names of registered ones.
        max_reply_chars: longer results of a tool are cut.
        max_calls: further calls of one turn are answered with an error.
        describe_tools: whether the prompt shows the tools' schemas; a policy that knows its tools needs none.
    """

    reply_roles = ("tool",)

    def __init__(
        self,
        *args: Any,
        tools: Sequence[str | Callable[..., Any]] = ("calculator",),
        max_steps: int = 4,
        max_reply_chars: int = 2000,
        max_calls: int = 4,
        describe_tools: bool = True,
        **kwargs: Any,
    ):
        functions = [TOOLS[tool] if isinstance(tool, str) else tool for tool in tools]
        self.tools = {function.__name__: function for function in functions}
        self.max_reply_chars = max_reply_chars
        self.max_calls = max_calls
        if describe_tools:
            kwargs.setdefault("tool_schemas", [get_json_schema(function) for function in functions])
        super().__init__(*args, max_steps=max_steps, **kwargs)

    async def respond(self, sample: SampleState) -> list[ChatMessage]:
        calls = CALL.findall(sample.last_message.content)
        sample.extras["tool_calls"] = sample.extras.get("tool_calls", 0) + len(calls)
        over = [self._error(sample, f"at most {self.max_calls} calls per turn")] * (len(calls) > self.max_calls)
        replies = await asyncio.gather(*(self._call(sample, text) for text in calls[: self.max_calls]))
        return [ChatMessage("tool", reply) for reply in [*replies, *over]]

    async def _call(self, sample: SampleState, text: str) -> str:
        try:
            call = json.loads(text)
            name, arguments = call["name"], call["arguments"]
            function = self.tools[name]
        except (ValueError, TypeError, RecursionError):
            return self._error(sample, 'a call must be {"name": ..., "arguments": {...}}')
        except KeyError as missing:
            return self._error(sample, f"no {missing}; tools: {', '.join(self.tools)}")
        if not isinstance(arguments, dict):
            return self._error(sample, "arguments must be an object")
        try:
            result = await self._run(function, arguments)
        except Exception as error:  # noqa: BLE001 - one of the two places: a tool run on the model's arguments
            return self._error(sample, f"{type(error).__name__}: {error}")
        return str(result)[: self.max_reply_chars]

    async def _run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        return await self.off_loop(lambda: function(**arguments))

    def _error(self, sample: SampleState, text: str) -> str:
        sample.extras["tool_errors"] = sample.extras.get("tool_errors", 0) + 1
        return f"Error: {text}"[: self.max_reply_chars]
