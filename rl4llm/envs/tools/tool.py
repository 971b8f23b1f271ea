"""What a tool is: a typed Python function with a docstring, alone or in a set that shares something."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar, overload

from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.option_types import check_types
from rl4llm.core.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__rl4llm_tool__"


class ToolError(Exception):
    """What a tool raises to tell the model why a call went wrong; its text is all that the model is shown."""


@dataclass(frozen=True, slots=True)
class Tool:
    """What the policy may call: its schema for the chat template, and the function behind it, plain or async.

    A plain function has a thread of its own for each call; an async one runs in the event loop of all episodes, which costs
    far less, and must not block it.
    `timeout_s` is its own deadline in seconds; None is that of the environment.
    """

    schema: Mapping[str, Any]
    function: Callable[..., Any]
    timeout_s: float | None = None

    @property
    def name(self) -> str:
        return str((self.schema.get("function") or self.schema)["name"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        return (self.schema.get("function") or self.schema).get("parameters") or {}


class _Marked(Protocol):
    def __call__(self, function: F) -> F: ...


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, timeout_s: float | None = None) -> _Marked: ...
def tool(function: Any = None, *, timeout_s: float | None = None) -> Any:
    '''Make a function a tool; it stays an ordinary function.

        @tool
        def weather(city: str, days: int = 1) -> str:
            """The weather forecast.

            Args:
                city: Name of a city.
                days: How many days ahead.
            """

    The schema that the model is shown comes from type hints and docstring; ConfigError says what is missing there.
    '''

    def marked(function: F) -> F:
        setattr(function, _MARK, Tool(_schema(function), function, timeout_s))
        return function

    return marked if function is None else marked(function)


def as_tool(function: Callable[..., Any]) -> Tool:
    """The tool of a function, decorated or not; of a method, bound to its object."""
    marked = getattr(function, _MARK, None)
    return Tool(_schema(function), function) if marked is None else Tool(marked.schema, function, marked.timeout_s)


class ToolSet:
    """Tools that share something: the methods marked with `@tool`.

        @register_tool("notes")
        class Notes(ToolSet):
            def __init__(self):
                super().__init__()
                self.texts = []

            def open(self, sample):
                return Notes()               # one for each episode; without this, one for all

            @tool
            def note(self, text: str) -> str: ...

    `tools` holds them by name. What a constructor takes are options beside the name in a configuration.
    """

    def __init__(self) -> None:
        names = [name for name in dir(type(self)) if hasattr(getattr(type(self), name), _MARK)]
        self.tools: Mapping[str, Tool] = {name: as_tool(getattr(self, name)) for name in names}

    def open(self, sample: Any) -> Self:
        """The tools of one episode, asked for at its first call. What is returned is closed with the episode, unless it is
        the set itself. May block."""
        return self

    def close(self) -> None:
        """Release what is held."""


class Functions(ToolSet):
    """Tools that share nothing: plain functions."""

    def __init__(self, *functions: Callable[..., Any]):
        self.tools = {made.name: made for made in map(as_tool, functions)}


TOOLS: Registry[Callable[..., Any] | type[ToolSet]] = Registry("env.tools")
register_tool = TOOLS.register


def as_toolset(item: Any, provided: Mapping[str, Any] | None = None) -> ToolSet:
    """A set of tools from what a configuration or a program names: a set, a class of sets, a function, a registered name or
    ``"package.module:thing"``, or a mapping of such a name and options.

    `provided` are objects of the run, such as its sandbox: a class that has a parameter of that name gets them.
    Raises ConfigError for unknown names and options.
    """
    options: dict[str, Any] = {}
    if isinstance(item, Mapping):
        options = {option: value for option, value in item.items() if option != "name"}
        item = item.get("name")
    if isinstance(item, str):
        item = TOOLS[item]
    if inspect.isclass(item) and issubclass(item, ToolSet):
        return _made(item, options, provided or {})
    if options or (not callable(item) and not isinstance(item, ToolSet)):
        raise ConfigError(f"env.tools: {item!r} is not accepted: a function without options, a ToolSet, or a name of one.")
    return item if isinstance(item, ToolSet) else Functions(item)


def homes(toolsets: Sequence[ToolSet]) -> dict[str, ToolSet]:
    """The set that each tool belongs to, by the tool's name; raises ConfigError when two have the same."""
    homes: dict[str, ToolSet] = {}
    for toolset in toolsets:
        for name in toolset.tools:
            if name in homes:
                raise ConfigError(f"env.tools: two tools are called {name!r}. Next step: leave one of them out.")
            homes[name] = toolset
    return homes


def _made(made: type[ToolSet], options: Mapping[str, Any], provided: Mapping[str, Any]) -> ToolSet:
    accepted = inspect.signature(made).parameters
    unknown_option = next((option for option in options if option not in accepted), None)
    if unknown_option is not None:
        raise ConfigError(unknown(f"env.tools: {made.__name__} option", unknown_option, accepted))
    check_types(f"env.tools: {made.__name__}", made, options)
    given = {name: thing for name, thing in provided.items() if name in accepted and thing is not None}
    try:
        return made(**{**given, **options})
    except TypeError as error:
        raise ConfigError(f"env.tools: {made.__name__}: {error}. Options: {', '.join(accepted)}.") from error


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            f"The tool {getattr(function, '__name__', function)!r} has no schema: {error} Next step: give each parameter a "
            "type hint, and the function a docstring whose `Args:` describes them all."
        ) from error
