"""Tool use: the policy writes tool calls, and the environment runs them and answers with tool messages."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from rl4llm.core.base_env import BaseMDPEnv, SampleState
from rl4llm.core.errors import EnvError
from rl4llm.core.images import Picture
from rl4llm.core.message import after_thinking, shortened
from rl4llm.core.schema import Count, Positive, checked
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.data.template import decode
from rl4llm.envs.tools import ToolError, ToolSet, as_toolset, homes
from rl4llm.envs.tools.arguments import objection
from rl4llm.envs.tools.formats import FORMATS, CallFormat, ToolCall, call_format, stray_calls
from rl4llm.envs.tools.tool import OpenedSet
from rl4llm.runtime.raised import kind_and_line, raised
from rl4llm.runtime.threads import LateError, within

GRACE_S = 30.0
MEND = ". If the model's arguments were wrong, the tool should raise rl4llm.ToolError; env.on_error=answer shows any error"
logger = logging.getLogger("rl4llm.envs")


def _as_json(value: Any) -> Any:
    """Return what stands for a value that JSON does not have; raise EnvError where that would be an address in memory."""
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)  # in one order in every process
    if hasattr(value, "tolist"):  # of NumPy or torch
        times = getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M")  # else counts of nanoseconds
        return (value.astype(str) if times else value).tolist()
    if re.search(r" at 0x[0-9a-f]+>", text := str(value)):
        raise EnvError(
            f"it returned an object of type {type(value).__name__}, which no model can read. Next: return text or JSON."
        )
    return text


_JSON = json.JSONEncoder(ensure_ascii=False, default=_as_json)


class Reply(NamedTuple):
    """The answer to a call, as texts and pictures, whether the call failed, and how long the tool ran."""

    parts: tuple[str | Picture, ...]
    failed: bool = False
    seconds: float | None = None


class ToolMDPEnv(BaseMDPEnv):
    """Run the tool calls of each turn until a turn has no call.

        <tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>

    The calls of a turn run concurrently, except calls to tools that belong to one episode, which run in order.
    A mistake of the model (a malformed call, an unknown tool, arguments that do not fit the tool's schema, a ToolError) gets
    a short error as its answer, in a message that is `failed`. Any other error of a tool is not the model's fault and fails
    the sample, with the class ``tool/<name>``. The log has `env/tool_calls` and `env/tool_errors` per episode, and for each
    tool `tool/<name>/calls` and `tool/<name>/raised/<error> at <file:line>`.

    Calls are parsed from the sampled tokens after the thoughts, see `rl4llm.core.message.after_thinking`.

    Args:
        tools: typed Python functions with a docstring, objects of a `ToolSet`, names of registered ones, or mappings of a
            name and options, such as ``{name: workspace, max_bytes: 100000}``.
        format: how the policy writes calls, see `rl4llm.envs.tools.formats`; "auto" detects it from the chat template.
        max_reply_chars: results of tools are cut to this many characters, and the cut is marked.
        max_calls: calls of one turn; further ones get an error. With 1, generation stops after the call. If a format marks
            the end of all calls of a turn, generation stops there in any case.
        budget: calls of an episode; further ones get an error. None for no limit.
        tool_timeout_s: deadline in seconds of tools without a separate deadline.
        on_timeout: "mask" fails the sample if a tool exceeds its deadline; "error" shows an error to the model.
        on_error: "fail" fails the sample if a tool raises another error than ToolError; "answer" shows it to the model.
        describe_tools: whether the prompt shows the tools' schemas, which a policy that knows its tools does not need. The
            system prompt describes the tools if the chat template does not show them.
        provided: objects of the run for tools that have a parameter of that name, such as its sandbox.
    """

    reply_roles = ("tool",)
    default_rewards = ("math",)

    @checked("env")
    def __init__(  # noqa: PLR0913 - each is an option of the configuration
        self,
        *args: Any,
        tools: Sequence[str | Mapping[str, Any] | Callable[..., Any] | ToolSet] = ("calculator",),
        format: str = "auto",
        max_steps: Count = 4,
        max_reply_chars: Count = 2000,
        max_calls: Count = 4,
        budget: Count | None = None,
        tool_timeout_s: Positive = 60.0,
        on_timeout: Literal["mask", "error"] = "mask",
        on_error: Literal["fail", "answer"] = "fail",
        describe_tools: bool = True,
        provided: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.max_reply_chars = max_reply_chars
        self.max_calls = max_calls
        self.budget = budget
        self.tool_timeout_s = tool_timeout_s
        self.on_timeout = on_timeout
        self.on_error = on_error
        self.toolsets = [as_toolset(item, provided=provided) for item in tools]
        self._homes = homes(self.toolsets)
        # By ids of samples, which are kept so that no other object gets their id, and by ids of sets.
        self._opened: dict[int, tuple[SampleState, dict[int, OpenedSet]]] = {}
        self._turns: dict[tuple[int, int], asyncio.Lock] = {}
        self.tools = {name: home.tools[name] for name, home in self._homes.items()}
        deadlines = [tool.timeout_s or tool_timeout_s for tool in self.tools.values()]
        self.respond_timeout_s = max(
            [self.respond_timeout_s, *(max_calls * deadline + GRACE_S for deadline in deadlines)]
        )
        if describe_tools:
            kwargs.setdefault("tool_schemas", [dict(tool.schema) for tool in self.tools.values()])
        super().__init__(*args, **kwargs | {"max_steps": max_steps})
        self._format = format
        if format != "auto":
            FORMATS[format]

    @cached_property
    def format(self) -> CallFormat:
        """How the policy writes calls; found at its first use, as `template_args` are set after the environment is made."""
        schemas = [dict(tool.schema) for tool in self.tools.values()]
        described, args = bool(self.tool_schemas), self.template_args
        return call_format(self._format, self.tokenizer, schemas, shown=described, template_args=args)

    @cached_property
    def call_example(self) -> str:  # type: ignore[override]
        """A call of the tool f with the argument x, as the policy writes it."""
        return self.format.example

    async def respond(self, sample: SampleState) -> list[ChatMessage]:
        turn = after_thinking(self._said(sample))
        calls = list(self.format.parse(turn)) or stray_calls(turn, self.tools, self.format)
        counts = sample.extras.setdefault("metrics", {"tool_calls": 0, "tool_errors": 0})
        earlier = counts["tool_calls"]
        counts["tool_calls"] += len(calls)
        limit = self.max_calls if self.budget is None else max(0, min(self.max_calls, self.budget - earlier))
        answers = [self._answer(sample, call) for call in calls[:limit]]
        replies = (
            list(await asyncio.gather(*answers)) if len(answers) > 1 else [await answer for answer in answers]
        )
        if len(calls) > self.max_calls:
            replies.append(self._error(sample, f"at most {self.max_calls} calls per turn"))
        elif len(calls) > limit:
            replies.append(self._error(sample, f"all {self.budget} calls of this task are used up"))
        return [
            ChatMessage.showing(
                "tool",
                *reply.parts,
                tool_calls=(self._answered(call, earlier + number),),
                failed=reply.failed,
                seconds=reply.seconds,
            )
            for number, (call, reply) in enumerate(zip(calls, replies, strict=False))
        ]

    def turn_params(self, sampling_params: SamplingParams) -> SamplingParams:
        return self.format.ending(sampling_params, self.tokenizer, self.max_calls)

    def _answered(self, call: ToolCall, number: int) -> dict[str, Any]:
        """Return a call as chat templates read it; they see no name that the policy made up."""
        name = call.name if call.name in self.tools else "unknown"
        function = {"name": name, "arguments": dict(call.arguments)}
        return {"id": call.id or f"call{number:05}", "type": "function", "function": function}

    def end_episode(self, sample: SampleState) -> list[Future[None]]:
        """Begin to close the tools that were opened for the sample."""
        _, sets = self._opened.pop(id(sample), (sample, {}))
        for home in self.toolsets:
            self._turns.pop((id(sample), id(home)), None)
        return [closing for opened in sets.values() if (closing := opened.close())]

    def close(self) -> None:
        """Release the tools and the rewards; logs a warning if a tool set cannot be closed."""
        samples = [sample for sample, _ in self._opened.values()]
        ended = wait([closing for sample in samples for closing in self.end_episode(sample)], GRACE_S).done
        errors = [closing.exception() for closing in ended]
        for toolset in self.toolsets:
            try:
                toolset.close()
            except Exception as error:  # noqa: BLE001 - a tool's own code; the others are still closed
                errors.append(error)
        for fault in filter(None, errors):
            logger.warning("%s", raised("closing the tools", fault))
        super().close()

    def _said(self, sample: SampleState) -> str:
        """Return the policy's last turn with its special tokens, which some formats use."""
        spans = takewhile(lambda span: span.author == "policy", reversed(sample.spans))
        token_ids = [token for span in [*spans][::-1] for token in span.token_ids]
        if not token_ids:  # a custom loop that records turns later
            return sample.last_message.content
        return decode(self.tokenizer, token_ids)

    async def _answer(self, sample: SampleState, call: ToolCall) -> Reply:
        exists = call.name in self.tools
        unknown = f"no tool {call.name[:50]!r}; tools: {', '.join(self.tools)}"
        problem = call.problem or (objection(self.tools[call.name], call.arguments) if exists else unknown)
        if problem:
            return self._error(sample, problem)
        async with self._in_turn(sample, call):
            begin = time.perf_counter()
            reply = await self._tried(sample, call)
        return reply._replace(seconds=time.perf_counter() - begin)

    async def _tried(self, sample: SampleState, call: ToolCall) -> Reply:
        deadline = self.tools[call.name].timeout_s or self.tool_timeout_s
        try:
            return Reply(self._shown(await within(deadline, self._run(sample, call))))
        except ToolError as error:
            return self._error(sample, str(error))
        except LateError:
            late = f"{call.name} took more than {deadline:g} s"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - one of the two places: a tool run on the model's arguments
            return self._broken(sample, call.name, error)
        if self.on_timeout == "mask":
            sample.fail(f"the tool {late}", "env/timeout")
        return self._error(sample, late)

    def _broken(self, sample: SampleState, name: str, error: BaseException) -> Reply:
        """Return the answer to a call whose tool raised an unexpected error; by default, fail the sample."""
        _count(sample, f"{name}/raised/{kind_and_line(error)}")
        if self.on_error == "fail" or isinstance(error, EnvError):
            step = "" if isinstance(error, EnvError) else MEND
            problem = raised(f"the tool {name}", error, self.tools[name].function)
            sample.fail(f"{problem}{step}", f"tool/{name}")
        return self._error(sample, f"{type(error).__name__}: {error}")

    def _in_turn(self, sample: SampleState, call: ToolCall) -> AbstractAsyncContextManager[Any]:
        """Make calls to tools of one episode wait for each other, in the order in which they were written."""
        home = self._homes[call.name]
        if not home.of_episodes:
            return nullcontext()
        return self._turns.setdefault((id(sample), id(home)), asyncio.Lock())

    async def _run(self, sample: SampleState, call: ToolCall) -> Any:
        home = self._homes[call.name]
        _count(sample, f"{call.name}/calls")
        if home.of_episodes:
            _, opened = self._opened.setdefault(id(sample), (sample, {}))
            if id(home) not in opened:
                opened[id(home)] = OpenedSet(home, sample)
            return await opened[id(home)].call(call.name, call.arguments)
        function = home.tools[call.name].function
        if inspect.iscoroutinefunction(function):
            return await function(**call.arguments)
        return await self.off_loop(lambda: function(**call.arguments))

    def _shown(self, result: Any) -> tuple[str | Picture, ...]:
        """Return a result as texts and pictures; a list with pictures has several parts."""
        if isinstance(result, Picture):
            return (result,)
        if isinstance(result, list | tuple) and any(isinstance(part, Picture) for part in result):
            return tuple(part if isinstance(part, Picture) else self._text(part) for part in result)
        return (self._text(result),)

    def _text(self, result: Any) -> str:
        """Return a result as valid Unicode of at most `max_reply_chars` characters."""
        result = _as_json(result) if isinstance(result, bytes | bytearray) else result
        if not isinstance(result, str):
            try:
                result = "no result" if result is None else _JSON.encode(result)
            except (ValueError, RecursionError) as error:  # too many digits, or too deep
                raise ToolError(f"the result cannot be shown: {error}") from error
        return shortened(result, self.max_reply_chars)

    def _error(self, sample: SampleState, text: str) -> Reply:
        sample.extras["metrics"]["tool_errors"] += 1
        return Reply(self._shown(f"Error: {text}"), failed=True)


def _count(sample: SampleState, what: str) -> None:
    """Count an event of a tool, for the metrics ``tool/...``."""
    counts = sample.extras.setdefault("tool_counts", {})
    counts[what] = counts.get(what, 0) + 1
