"""Tool use: the policy writes tool calls, the environment runs them and answers with tool messages."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Literal

from rl4llm.core.base_env import BaseMDPEnv, SampleState
from rl4llm.core.deadline import LateError, within
from rl4llm.core.errors import ConfigError, EnvError
from rl4llm.core.types import ChatMessage, SamplingParams, TokenSpan
from rl4llm.data.template import decode
from rl4llm.envs.registry import register_env
from rl4llm.envs.tools import ToolError, ToolSet, as_toolset, homes
from rl4llm.envs.tools.arguments import objection
from rl4llm.envs.tools.formats import ToolCall, call_format
from rl4llm.sandbox import Runner

GRACE_S = 30.0
THOUGHT_ENDS = "</think>"
_JSON = json.JSONEncoder(ensure_ascii=False, default=str)


@register_env("tool")
class ToolMDPEnv(BaseMDPEnv):
    """Runs the calls of each turn, until a turn has none: all at once, but those to one episode's own tools in their order.

        <tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>

    What the model got wrong (a malformed call, an unknown tool, arguments the tool does not take, a tool that raises) is
    answered with a short error that it can learn from. A tool that raises EnvError says that it is not the model's fault:
    that fails the sample. Logged are `env/tool_calls` of an episode and, among them, `env/tool_errors`.

    Calls are read from the very tokens that were sampled. What stands before ``</think>`` is no call.

    Args:
        tools: typed Python functions with a docstring, objects of a `ToolSet`, names of registered ones, or mappings of a
            name and options, such as ``{name: workspace, max_bytes: 100000}``.
        format: how the policy writes calls, see `rl4llm.envs.tools.formats`; "auto" takes the chat template's.
        max_reply_chars: longer results of a tool are cut.
        max_calls: further calls of one turn are answered with an error. With 1, generation stops behind the call. Where a
            format has an end for all calls of a turn, it stops there in any case.
        budget: calls of an episode; further ones are answered with an error. None for any number.
        tool_timeout_s: seconds that a tool may take which has no deadline of its own.
        on_timeout: "mask" fails the sample when a tool takes longer; "error" answers the model so.
        describe_tools: whether the prompt shows the tools' schemas; a policy that knows its tools needs none.
        sandbox: where tools run programs, for those that do.
    """

    reply_roles = ("tool",)

    def __init__(
        self,
        *args: Any,
        tools: Sequence[str | Mapping[str, Any] | Callable[..., Any] | ToolSet] = ("calculator",),
        format: str = "auto",
        max_steps: int = 4,
        max_reply_chars: int = 2000,
        max_calls: int = 4,
        budget: int | None = None,
        tool_timeout_s: float = 60.0,
        on_timeout: Literal["mask", "error"] = "mask",
        describe_tools: bool = True,
        sandbox: Runner | None = None,
        **kwargs: Any,
    ):
        if on_timeout not in ("mask", "error"):
            raise ConfigError(f"env.on_timeout={on_timeout!r} is not accepted: mask or error.")
        limits = {
            "max_calls": max_calls,
            "budget": budget,
            "tool_timeout_s": tool_timeout_s,
            "max_reply_chars": max_reply_chars,
        }
        for name, limit in limits.items():
            if limit is not None and not limit > 0:
                raise ConfigError(f"env.{name}={limit} is not accepted: above 0.")
        self.max_reply_chars = max_reply_chars
        self.max_calls = max_calls
        self.budget = budget
        self.tool_timeout_s = tool_timeout_s
        self.on_timeout = on_timeout
        self.toolsets = [as_toolset(item, provided={"sandbox": sandbox}) for item in tools]
        self._homes = homes(self.toolsets)
        # By ids of samples, which are kept so that no other gets their id, and of sets.
        self._opened: dict[int, tuple[SampleState, dict[int, ToolSet]]] = {}
        self._turns: dict[tuple[int, int], asyncio.Lock] = {}
        self.tools = {name: home.tools[name] for name, home in self._homes.items()}
        deadlines = [tool.timeout_s or tool_timeout_s for tool in self.tools.values()]
        self.respond_timeout_s = max([self.respond_timeout_s, *(max_calls * deadline + GRACE_S for deadline in deadlines)])
        if describe_tools:
            kwargs.setdefault("tool_schemas", [dict(tool.schema) for tool in self.tools.values()])
        super().__init__(*args, **kwargs | {"max_steps": max_steps})
        self.format = call_format(format, self.tokenizer, self.tool_schemas)

    async def respond(self, sample: SampleState) -> list[ChatMessage]:
        calls = list(self.format.parse(self._said(sample).rpartition(THOUGHT_ENDS)[2]))
        counts = sample.extras.setdefault("metrics", {"tool_calls": 0, "tool_errors": 0})
        earlier = counts["tool_calls"]
        counts["tool_calls"] += len(calls)
        left = self.max_calls if self.budget is None else max(0, min(self.max_calls, self.budget - earlier))
        answers = [self._answer(sample, call) for call in calls[:left]]
        replies = list(await asyncio.gather(*answers)) if len(answers) > 1 else [await answer for answer in answers]
        if len(calls) > self.max_calls:
            replies.append(self._error(sample, f"at most {self.max_calls} calls per turn"))
        elif len(calls) > left:
            replies.append(self._error(sample, f"all {self.budget} calls of this task are used up"))
        return [ChatMessage("tool", reply) for reply in replies]

    def turn_params(self, sampling_params: SamplingParams) -> SamplingParams:
        """What ends calls ends the turn: as a token, which stays in the text, or as the text of several tokens."""
        end = self.format.stop(self.max_calls)
        if not end:
            return sampling_params
        token = self.tokenizer.get_vocab().get(end)
        if token is None:
            return sampling_params.replace(stop=(*sampling_params.stop, end))
        return sampling_params.replace(stop_token_ids=(*sampling_params.stop_token_ids, token))

    def end_episode(self, sample: SampleState) -> None:
        """Close the tools that the sample had for itself."""
        _, sets = self._opened.pop(id(sample), (sample, {}))
        for home in self.toolsets:
            self._turns.pop((id(sample), id(home)), None)
        for opened in sets.values():
            if opened not in self.toolsets:
                opened.close()

    def close(self) -> None:
        """Release the tools and the rewards."""
        for sample, _ in list(self._opened.values()):
            self.end_episode(sample)
        for toolset in self.toolsets:
            toolset.close()
        super().close()

    def _said(self, sample: SampleState) -> str:
        """The policy's last turn with its special tokens, in which some formats are written."""
        spans: list[TokenSpan] = []
        for span in reversed(sample.spans):
            if span.author != "policy":
                break
            spans.insert(0, span)
        token_ids = [token for span in spans for token in span.token_ids]
        if not token_ids:  # a loop that records its turns later
            return sample.last_message.content
        return decode(self.tokenizer, token_ids)

    async def _answer(self, sample: SampleState, call: ToolCall) -> str:
        problem = call.problem or self._objection(call)
        if problem:
            return self._error(sample, problem)
        deadline = self.tools[call.name].timeout_s or self.tool_timeout_s
        try:
            async with self._in_turn(sample, call):
                return self._shown(await within(deadline, self._run(sample, call)))
        except EnvError:
            raise
        except LateError:
            late = f"{call.name} took more than {deadline:g} s"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - one of the two places: a tool run on the model's arguments
            kind = "" if isinstance(error, ToolError) else f"{type(error).__name__}: "
            return self._error(sample, f"{kind}{error}")
        if self.on_timeout == "mask":
            sample.fail(f"the tool {late}", "env/timeout")
        return self._error(sample, late)

    def _in_turn(self, sample: SampleState, call: ToolCall) -> AbstractAsyncContextManager[Any]:
        """What belongs to one episode is used by one call after the other, in the order in which they were written."""
        home = self._homes[call.name]
        if type(home).open is ToolSet.open:
            return nullcontext()
        return self._turns.setdefault((id(sample), id(home)), asyncio.Lock())

    def _objection(self, call: ToolCall) -> str | None:
        if call.name not in self.tools:
            return f"no tool {call.name[:50]!r}; tools: {', '.join(self.tools)}"
        return objection(self.tools[call.name], call.arguments)

    async def _run(self, sample: SampleState, call: ToolCall) -> Any:
        home = self._homes[call.name]
        _, opened = self._opened.setdefault(id(sample), (sample, {}))
        if id(home) not in opened:
            opened[id(home)] = home.open(sample)
        function = opened[id(home)].tools[call.name].function
        if inspect.iscoroutinefunction(function):
            return await function(**call.arguments)
        return await self.off_loop(lambda: function(**call.arguments))

    def _shown(self, result: Any) -> str:
        """A result as a text that every tokenizer takes: short, and without halves of characters."""
        if not isinstance(result, str):
            result = "no result" if result is None else _JSON.encode(result)
        return result[: self.max_reply_chars].encode(errors="replace").decode()

    def _error(self, sample: SampleState, text: str) -> str:
        sample.extras["metrics"]["tool_errors"] += 1
        return self._shown(f"Error: {text}")
