"""Tools are typed Python functions with a docstring, alone or in a set that shares state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar, overload

from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from rl4llm.core.errors import ConfigError, EnvError, unnamed
from rl4llm.core.schema import accepted_options, check_options, with_options
from rl4llm.core.tables import TOOLS
from rl4llm.runtime.raised import place_of
from rl4llm.runtime.threads import OneThread, in_thread, result_of

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__rl4llm_tool__"


class ToolError(Exception):
    """Raised by a tool to tell the model why a call failed; the model gets its text."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call, plain or async, with its schema for the chat template.

    Each call of a plain function runs in a new thread. An async function runs in the event loop of all episodes, which costs
    far less, and must not block.
    `timeout_s` is its deadline in seconds; None is that of the environment.
    """

    schema: Mapping[str, Any]
    function: Callable[..., Any]
    timeout_s: float | None = None

    @property
    def name(self) -> str:
        return str((self.schema.get("function") or self.schema)["name"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Return the JSON schema of its arguments."""
        return (self.schema.get("function") or self.schema).get("parameters") or {}


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, timeout_s: float | None = None) -> Callable[[F], F]: ...
def tool(function: Any = None, *, timeout_s: float | None = None) -> Any:
    '''Make a function a tool; it can still be called as usual.

        @tool
        def weather(city: str, days: int = 1) -> str:
            """The weather forecast.

            Args:
                city: Name of a city.
                days: How many days ahead.
            """

    The schema that the model sees comes from type hints and docstring; ConfigError tells what they lack.
    '''

    def marked(function: F) -> F:
        setattr(function, _MARK, Tool(_schema(function), function, timeout_s))
        return function

    return marked if function is None else marked(function)


def as_tool(function: Callable[..., Any]) -> Tool:
    """Return the tool of a function, decorated or not, or of a bound method."""
    marked: Tool = getattr(function, _MARK, None) or Tool(_schema(function), function)
    return replace(marked, function=function)


class ToolSet:
    """A set of tools that share state: its methods marked with `@tool`.

        @register_tool("notes")
        class Notes(ToolSet):
            def __init__(self):
                super().__init__()
                self.texts = []

            def open(self, sample):
                return Notes()               # a new set for each episode; by default all share one

            @tool
            def note(self, text: str) -> str: ...

    `tools` maps names to tools. In a configuration, parameters of the constructor are options beside the name.
    """

    def __init__(self) -> None:
        names = [name for name in dir(type(self)) if hasattr(getattr(type(self), name), _MARK)]
        self.tools: Mapping[str, Tool] = {name: as_tool(getattr(self, name)) for name in names}

    @property
    def of_episodes(self) -> bool:
        """Return whether each episode has a separate set, from `open`."""
        return type(self).open is not ToolSet.open

    def open(self, sample: Any) -> Self:
        """Return the tools of one episode; called at its first call, and may block.

        The result is closed with the episode unless it is the set itself.
        """
        return self

    def close(self) -> None:
        """Release all resources."""


class OpenedSet:
    """The set that a tool set opened for one episode.

    If one of its tools is a plain function, one thread opens the set, calls plain functions and closes it. So it may keep
    objects that belong to a thread, such as a connection of sqlite3. Async tools run in the event loop, and a set that has
    no other is opened there and closed in a thread, as closing may block.
    """

    def __init__(self, home: ToolSet, sample: Any):
        self._home, self._sample = home, sample
        self._set: ToolSet | None = None
        plain = any(not inspect.iscoroutinefunction(tool.function) for tool in home.tools.values())
        self._thread = OneThread("rl4llm-tools") if plain else None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the result of a tool; calls must not overlap."""
        opened = self._set
        if opened is None:
            opened = await self._done(self._opened)
        tool = opened.tools[name]
        if inspect.iscoroutinefunction(tool.function):
            return await tool.function(**arguments)
        return await self._done(lambda: tool.function(**arguments))

    def close(self) -> Future[None] | None:
        """Begin to close the set; None if an abandoned call still occupies its thread, which closes it later."""
        if self._thread is None:
            return None if self._set is None else in_thread("rl4llm-tools", self._close)
        waits = self._thread.is_idle
        closing = self._thread.put(self._close)
        self._thread.end()
        return closing if waits else None

    async def _done(self, work: Callable[[], T]) -> T:
        return work() if self._thread is None else await result_of(self._thread.put(work))

    def _opened(self) -> ToolSet:
        if self._set is None:
            try:
                self._set = self._home.open(self._sample)
            except ToolError as error:  # not the model's fault
                raise EnvError(f"{type(self._home).__name__}.open: {error}") from error
        return self._set

    def _close(self) -> None:
        if self._set is not None and self._set is not self._home:
            self._set.close()


class Functions(ToolSet):
    """A set of plain functions that share nothing."""

    def __init__(self, *functions: Callable[..., Any]):
        self.tools = {entry.name: entry for entry in map(as_tool, functions)}


def as_toolset(item: Any, provided: Mapping[str, Any] | None = None) -> ToolSet:
    """Return the tool set of a set, a class of sets, a function, a name, or a mapping of a name and options.

    A name is registered or of the form ``"package.module:thing"``.
    `provided` has objects of the run, such as its sandbox, for classes that have a parameter of that name.
    Raises ConfigError for unknown names and options.
    """
    spec, (item, options) = item, _named(item)
    if inspect.isclass(item) and issubclass(item, ToolSet):
        provided = provided or {}
        parameters = accepted_options(item) - set(options)
        objects = {name: provided[name] for name in provided if name in parameters}
        return with_options(f"env.tools: {item.__name__}", item, options, **objects)
    if options or (not callable(item) and not isinstance(item, ToolSet)):
        raise ConfigError(
            f"env.tools: {spec!r} is not accepted. Accepted: a function without options, a ToolSet, or the name of one."
        )
    return item if isinstance(item, ToolSet) else Functions(item)


def check_tool(item: Any) -> None:
    """Raise ConfigError for what `as_toolset` refuses; a set of tools is not made, since that may start something."""
    target, options = _named(item)
    if inspect.isclass(target) and issubclass(target, ToolSet):
        check_options(f"env.tools: {target.__name__}", target, options)
    else:
        as_toolset(item)


def _named(item: Any) -> tuple[Any, dict[str, Any]]:
    """Return what an item of `env.tools` names, and its options."""
    options: dict[str, Any] = {}
    if isinstance(item, Mapping):
        options = {option: value for option, value in item.items() if option != "name"}
        if item.get("name") is None:
            raise ConfigError(unnamed("env.tools: a tool", item, TOOLS))
        item = item["name"]
    return TOOLS[item] if isinstance(item, str) else item, options


def homes(toolsets: Sequence[ToolSet]) -> dict[str, ToolSet]:
    """Return the set of each tool, by the tool's name; raises ConfigError if two tools have the same name."""
    homes: dict[str, ToolSet] = {}
    for toolset in toolsets:
        for name in toolset.tools:
            if name in homes:
                raise ConfigError(
                    f"env.tools: two tools have the name {name!r}. Next step: remove one of them."
                )
            homes[name] = toolset
    return homes


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        name = getattr(function, "__name__", function)
        step = "Next step: give each parameter a type hint, and the docstring an `Args:` that describes it."
        where = f" ({place})" if (place := place_of(function)) else ""
        problem = str(error).rstrip(".!")
        raise ConfigError(f"The tool {name!r} has no schema: {problem}{where}. {step}") from error
