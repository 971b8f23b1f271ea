"""Messages as chat templates read them, what the renderer asks of them, and tools in words for templates that hide them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rl4llm.core.errors import ConfigError, TemplateError, did_you_mean
from rl4llm.core.message import THOUGHTS
from rl4llm.core.types import ChatMessage

_TRUTHS = ("true", "false", "yes", "no", "on", "off")
_BARE: Mapping[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}
# bytes per byte under Unicode normal form KC, the most that a tokenizer's normalizer makes of a text
_MAX_EXPANSION = 11
_ASKED = ChatMessage("user", "ProbeOpeningQuestion")
_OPENINGS = ([_ASKED], [ChatMessage("system", "ProbeSystemPrompt"), _ASKED])
_ARGUMENTS = {"probe": "ProbeArgument"}
_CALL = {"id": "probecall", "type": "function", "function": {"name": "probe_call", "arguments": _ARGUMENTS}}

_TOOLS = "You can call these tools, which are described by JSON schemas:"
_CALLS = (
    "To call a tool, write its name and arguments. For example, a call of a tool f with the argument x is:"
)
_ANSWERS = "The answer of the tool is in the next message."

Render = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""Rows of messages -> what a template makes of them, without the generation prompt; None if it refuses them."""


class CallForm(NamedTuple):
    """How a template reads a message with calls: null instead of empty content, and arguments as JSON text."""

    null_content: bool
    text_arguments: bool


_FORMS = (CallForm(False, False), CallForm(True, False), CallForm(False, True), CallForm(True, True))


def found_call_form(render: Render) -> CallForm:
    """Return the first form in which a template writes a call."""
    calling = ChatMessage("assistant", "", (_CALL,))
    for form in _FORMS:
        for messages in _OPENINGS:
            text = render([*map(shown_message, messages), shown_message(calling, form)]) or ""
            parts = ("probe_call", *_ARGUMENTS, *_ARGUMENTS.values())
            if all(part in text for part in parts) and repr(_ARGUMENTS) not in text:
                return form
    return _FORMS[0]


def shows_reasoning(render: Render) -> bool:
    """Return whether a template writes what the assistant thought before it spoke."""
    answer = ChatMessage("assistant", "ProbeAnswer", reasoning="ProbeReasoning")
    texts = (render([*map(shown_message, messages), shown_message(answer)]) or "" for messages in _OPENINGS)
    return any("ProbeReasoning" in text for text in texts)


def shown_message(message: ChatMessage, form: CallForm | None = None) -> dict[str, Any]:
    """Return a message as templates see it, with calls in the `form` that they need.

    Its texts need no copy, only calls can hold anything.
    """
    row = message.to_dict()
    row.pop("weight", None)
    if message.reasoning:
        row |= dict.fromkeys(THOUGHTS, message.reasoning)  # each template reads one of these keys
    if message.parts:
        row.pop("parts")
        row["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in message.parts
        ]
    texts_only = (
        not message.tool_calls and not message.parts and type(message.role) is type(message.content) is str
    )
    if texts_only:
        return row
    row = plain(row)
    if form is not None and "tool_calls" in row:
        row["content"] = row["content"] or (None if form.null_content else "")
        row["tool_calls"] = [_with_text(call) if form.text_arguments else call for call in row["tool_calls"]]
    return row


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        function = function | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    return call | {"function": function} if "function" in call else function


def marked(message: ChatMessage, mark: str) -> ChatMessage:
    """Return an assistant's message with `mark` in place of its text, or of the arguments of its last call."""
    if not message.tool_calls:
        return replace(message, content=mark)
    *calls, call = message.tool_calls
    function = dict(call.get("function") or call)
    function["arguments"] = (
        f'{{"mark": "{mark}"}}' if isinstance(function.get("arguments"), str) else {"mark": mark}
    )
    marked = {**call, "function": function} if "function" in call else function
    return replace(message, tool_calls=(*calls, marked))


def unread_args(args: Mapping[str, Any], source: str) -> set[str]:
    """Return notes about the variables that the source of a template does not read.

    Raises ConfigError for a text such as 'no' where the source asks whether the variable is true, which any text is.
    """
    words = set(re.findall(r"\w+", source)) - {"add_generation_prompt", "messages"}
    for name, value in args.items():
        truth = isinstance(value, str) and value.lower() in _TRUTHS
        tested = rf"\b(if|and|or|not)\s+{re.escape(name)}\b(?!\s*[=!|.])"
        if truth and re.search(tested, source) and not re.search(f"['\"]{value}['\"]", source, re.IGNORECASE):
            raise ConfigError(
                f"env.template_args: {name}={value!r} is a string, which is true in a template. Accepted: true or false."
            )
    return {
        f"it does not read {name!r} of env.template_args.{did_you_mean(name, words)} The variable has no effect"
        for name in args
        if name not in words
    }


def plain(value: Any) -> Any:
    """Return what a template is shown: templates come from strangers, and objects have methods.

    A name stands for what is no data. New versions of transformers show the same, and older ones things as they are.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(plain(item) for item in value)
    bare = next((bare for kind, bare in _BARE.items() if isinstance(value, kind)), None)
    return bare(value) if bare else f"<{type(value).__name__}>"


def answering(asked: Sequence[ChatMessage], new: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return new messages in which answers of tools hold the calls of the message before them."""
    calls = list(asked[0].tool_calls or ()) if asked else []
    result = list(new)
    for number, message in enumerate(new):
        if message.role != "tool" or message.tool_calls or not calls:
            break
        same = [call for call in calls if message.tool_call_id and call.get("id") == message.tool_call_id]
        call = same[0] if same else calls[min(number, len(calls) - 1)]
        result[number] = replace(message, tool_calls=(call,))
    return result


def roles_of(messages: Sequence[ChatMessage]) -> str:
    """Return the roles of messages, for error messages."""
    return f"[{', '.join(message.role for message in messages)}]"


def description(schemas: Sequence[str], example: str) -> str:
    """Return a text that tells which tools there are and how a call is written."""
    return "\n".join([_TOOLS, *schemas, _CALLS, example, _ANSWERS])


def with_description(rows: list[dict[str, Any]], text: str, *, in_system: bool) -> list[dict[str, Any]]:
    """Return rows of messages with a text at the end of the system prompt, or before the first message."""
    head, *rest = rows
    if not in_system:
        return [head | {"content": _after(f"{text}\n\n", head["content"])}, *rest]
    if head["role"] == "system":
        return [head | {"content": f"{head['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *rows]


def _after(text: str, content: Any) -> Any:
    """Return a message's content behind a text; content with images is a list of parts."""
    return [{"type": "text", "text": text}, *content] if isinstance(content, list) else f"{text}{content}"


def most_bytes(text: str) -> int:
    """Return the most bytes that a tokenizer's normalizer can make of `text`, and so the most tokens."""
    return len(text) if text.isascii() else _MAX_EXPANSION * len(text.encode())


class Frames:
    """Bounds the tokens of prompts without rendering them: a token covers at least one byte.

    Args:
        render: renders messages, with the generation prompt.
        length: counts the tokens of the prompt that messages are.
    """

    def __init__(
        self, render: Callable[[Sequence[ChatMessage]], str], length: Callable[[Sequence[ChatMessage]], int]
    ):
        self._render, self._length = render, length
        self._bytes: dict[tuple[str, ...], int | None] = {}  # of a rendering without its contents, by roles

    def too_long(self, messages: Sequence[ChatMessage], limit: int) -> int | None:
        """Return the number of tokens of a prompt if it exceeds `limit`, else None; most prompts need no rendering."""
        most = self.most_tokens(messages)
        if most is not None and most <= limit:
            return None
        count = self._length(messages)
        return count if count > limit else None

    def most_tokens(self, messages: Sequence[ChatMessage]) -> int | None:
        """Return a number of tokens that a prompt does not exceed; None if its contents may not appear unchanged in it."""
        roles = tuple(message.role for message in messages)
        if not set(roles) <= {"system", "user"} or any(message.parts for message in messages):
            return None
        if roles not in self._bytes:
            made_up = [ChatMessage(role, f"ProbeContent{number}End") for number, role in enumerate(roles)]
            text = self._render(made_up)
            contents = sum(len(message.content) for message in made_up)
            stand_once = all(text.count(message.content) == 1 for message in made_up)
            self._bytes[roles] = most_bytes(text) - contents if stand_once else None
        frame = self._bytes[roles]
        return None if frame is None else frame + sum(most_bytes(message.content) for message in messages)


def unusable(name: str, what: str, reason: str | None) -> TemplateError:
    """Return the error for a template that cannot be used for `what`."""
    return TemplateError(
        f"The chat template of {name} cannot be used for {what}: {reason}. Next step: give the tokenizer another chat "
        "template, whose rendering of a conversation grows only at its end, or choose an environment without such messages."
    )
