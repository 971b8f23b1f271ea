"""A tool call as it was written, a format of calls, and what all parsers share: bounds, JSON, and short problems."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rl4llm.core.types import SamplingParams

MAX_CALL_CHARS = 100_000
MAX_DEPTH = 100
NAME = re.compile(r"[^\W\d][\w.:/-]{0,199}")
ARGUMENTS = ("arguments", "parameters", "args", "kwargs", "params", "input", "tool_input")
_BESIDE_ARGUMENTS = ("name", "tool_name", "function", "type", "id", "index", "tool_call_id")
_WRAPPER = re.compile(
    r"(?:(?:```\w*|\[|functools|<[^<>/\s]{0,40}(?:call|tool|function|action|message_sep)[^<>/\s]{0,40}>)\s*)+\Z"
)
_DECODER = json.JSONDecoder()
_ID = re.compile(r"[\w.:/-]{1,200}")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it, with its `id` if it wrote one; `problem` tells why it is malformed, if it is."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    id: str = field(default="", compare=False)


class Written(str):
    """The text of an argument whose type the format does not tell; the tool's schema does, see `typed`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How to find calls, and where a turn with calls ends.

    Args:
        parse: yields the calls of a turn; it gets the special tokens too, and never raises.
        example: a call of the tool f with the argument x, as a model writes it.
        ends_call: the text after each call, "" for no such text.
        ends_calls: the text after the last call of a turn, "" for no such text.
        begins: possible beginnings of the first call of a turn.
    """

    parse: Callable[[str], Iterator[ToolCall]]
    example: str = ""
    ends_call: str = ""
    ends_calls: str = ""
    begins: tuple[str, ...] = ()

    def beside(self, text: str) -> str:
        """Return the text of a turn before its calls and what wraps them; all of it if no beginning is found."""
        places = {begin: place for begin in self.begins if (place := text.find(begin)) >= 0}
        marks = {begin for begin in places if len(begin) > 2} or places  # any text may have { and [
        return _WRAPPER.sub("", text[: min(places[begin] for begin in marks)]) if places else text

    def stop(self, max_calls: int) -> str:
        """Return the text at which generation may stop for at most `max_calls` calls per turn; "" for none."""
        return self.ends_calls or (self.ends_call if max_calls == 1 else "")

    def ending(self, params: SamplingParams, tokenizer: Any, max_calls: int) -> SamplingParams:
        """Stop a turn at the end of its calls: at one token, which stays in the text, or at a stop string."""
        end = self.stop(max_calls)
        token = tokenizer.get_vocab().get(end)
        if token is not None:
            return params.replace(stop_token_ids=(*params.stop_token_ids, token))
        return params.replace(stop=(*params.stop, end)) if end else params


def read(text: str, key: str = "arguments", name: str = "") -> ToolCall:
    """Return the call of a JSON object with its arguments under `key`; with a `name`, the text is only the arguments."""
    try:
        value = loaded(text)
        return as_call({"name": name, key: value} if name else value, key)
    except ValueError as error:
        return not_a_call(error)


def as_call(value: Any, key: str = "arguments") -> ToolCall:
    """Return the call of a mapping; models that know several formats mix up keys of arguments and quote objects.

    Raises ValueError for anything that is not a call.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {**value, **value["function"]}
    names = [value.get(each) for each in ("name", "tool_name", "function")] if isinstance(value, dict) else []
    name = next((each for each in names if each and isinstance(each, str)), None)
    if name is None:
        raise ValueError(f'a call must be {{"name": ..., "{key}": {{...}}}}')
    under = next((word for word in (key, *ARGUMENTS) if word in value), None)
    if under is None and (unread := [word for word in value if word not in _BESIDE_ARGUMENTS]):
        raise ValueError(f"arguments belong under {key!r}, not {unread[0][:50]!r}")
    arguments: Any = value[under] if under else {}
    if isinstance(arguments, str):
        arguments = loaded(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return replace(checked(name, arguments), id=written_id(value.get("id")))


def written_id(value: Any) -> str:
    """Return the id that stands in a call; "" for what no chat template would write as an id."""
    return value if isinstance(value, str) and _ID.fullmatch(value) else ""


def checked(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    """Return a call; raises ValueError if its arguments are nested too deeply."""
    level: list[Any] = [arguments]
    for _ in range(MAX_DEPTH):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    if level:
        raise ValueError("it is nested too deeply")
    return ToolCall(name, arguments)


def not_a_call(error: Exception) -> ToolCall:
    """Return the call that tells why it cannot be read."""
    return ToolCall(problem=f"the call cannot be read: {error}"[:200])


def not_closed(end: str) -> ToolCall:
    """Return the call that tells by what it is not closed."""
    return ToolCall(problem=f"the call is not closed by {end}")


def loaded(text: str) -> Any:
    """Return the value of a JSON text; raises ValueError."""
    (value, *rest) = values(text)
    if rest:
        raise ValueError("it is followed by further values")
    return value


def values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, at least one; raises ValueError."""
    check_length(text)
    at = space_end(text, 0)
    while True:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        yield value
        at = space_end(text, end)
        if at == len(text):
            return


def first(text: str) -> str:
    """Return the JSON value at the start of a text, or the whole text if there is no such value."""
    if len(text) > MAX_CALL_CHARS:
        return text
    try:
        return text[: _DECODER.raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text


def bodies(text: str, head: re.Pattern[str], end: str = "") -> Iterator[tuple[str | None, re.Match[str]]]:
    """Yield the text behind each head up to its `end`, None if there is none, or the JSON value behind it without `end`.

    What stands in a JSON value is neither a head nor an end.
    """
    match = head.search(text)
    while match:
        start = match.end()
        behind = _values_end(text, start)
        following = head.search(text, behind)
        stop = following.start() if following else len(text)
        place = text.find(end, behind, stop) if end else stop
        body = None if place < 0 else text[start:place]
        yield body if end or body is None else first(body.lstrip()), match
        match = following


def _values_end(text: str, at: int) -> int:
    """Return where the JSON values at a place end; the place itself if no value stands there."""
    window, end = text[at : at + MAX_CALL_CHARS], 0
    try:
        while True:
            end = _DECODER.raw_decode(window, space_end(window, end))[1]
    except (ValueError, RecursionError):
        return at + end


def check_length(text: str) -> None:
    """Raise ValueError for a text that is too long for a call."""
    if len(text) > MAX_CALL_CHARS:
        raise ValueError(f"it has {len(text)} characters, but at most {MAX_CALL_CHARS} are accepted")


def space_end(text: str, at: int) -> int:
    """Return where the white space at a place ends."""
    match = _SPACE.match(text, at)
    return match.end() if match else at
