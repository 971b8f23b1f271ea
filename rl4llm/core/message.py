"""A message of a conversation, the forms in which data sets write one, and the thoughts before a reply.

Every key of a stored message is read, is metadata, or is refused by name. A key whose value is empty is absent: files with
columns fill missing keys with null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.core.images import Picture

ROLES = ("system", "user", "assistant", "tool")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which data sets store what the assistant thought, and templates read it."""

FLAGS = ("weight", "train", "trainable", "loss_mask", "loss")
"""Keys that tell whether a message is learned: 0 or false if not, 1 or true if so."""

METADATA = frozenset((
    "id", "name", "message_id", "parent_id", "index", "refusal", "annotations", "timestamp", "created", "created_at",
    "date", "language", "lang", "model", "source", "turn", "turn_identifier", "token_count", "finish_reason",
    "hashed_ip", "country", "state", "header", "redacted", "toxic", "failed", "seconds",
))  # fmt: skip
"""Keys that tell something about a message that no model reads."""

UNSEEN = "but only text is read here. Images are read with model.vision=frozen, in prompts and conversations."
MEDIA = ("image", "images", "image_url", "video", "videos", "audio", "audios")

_THINK = r"(?:\w+:)?think(?:ing)?(?::\w+)?"
_UNIQUE_MARKS = (
    (rf"<({_THINK})>", r"</\1>"),
    (r"\[THINK\]", r"\[/THINK\]"),
    ("◁think▷", "◁/think▷"),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    (r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>"),
)
_SHARED_MARKS = (  # what ends these thoughts may also end other texts
    (r"<(thought|reasoning)>", r"</\1>"),
    (r"<\|channel>thought", r"<channel\|>"),
    (r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>", r"<\|end\|>"),
    (r"(?:<\|begin\|>assistant)?<\|think\|>", r"<\|end\|>"),
    (r"(?:<\|start\|>assistant)? ?to=self<\|message\|>", r"<\|eom\|>"),
)
THOUGHT_MARKS = tuple((re.compile(begin), end) for begin, end in (*_UNIQUE_MARKS, *_SHARED_MARKS))
"""What begins a thought and the pattern of what ends it, for all models with such marks."""
CUT = "[... cut ...]"
_MAX_QUOTED = 200
_END = "|".join((rf"</{_THINK}>", r"\[BEGIN FINAL RESPONSE\]", *(end for _, end in _UNIQUE_MARKS[1:])))
_ANSWER = re.compile(  # what begins an answer that has a mark
    r"\s*(?:<\|(?:start|begin)\|>assistant)?(?:<\|channel\|>final<\|message\|>|<\|content\|>|<\|START_(?:TEXT|RESPONSE)\|>"
    r"|<\|open\|>response<\|sep\|>|<\|begin_of_solution\|>)"
)
_LONGEST_PATH = 512
_BASE64 = re.compile(r"[A-Za-z0-9+/=_\s-]+")
_QUOTE = re.compile(r"(?<!\\)(?:\"|(?<!`)`(?!`)|(?<!\w)'|'(?!\w))")
_ROLE_NAMES = {role: role for role in ROLES} | {
    "developer": "system",
    "function": "tool",
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "tool_response": "tool",
}
IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_MEDIA_FILES = (*IMAGE_FILES, ".mp4", ".avi", ".mov", ".mkv", ".webm", ".wav", ".mp3", ".flac", ".ogg")
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image", "image_url", "input_image")

Part = str | Picture
ReadPicture = Callable[[Any], Picture]
"""What a part of a message holds, None for the next image of the row's column -> the picture."""

_OTHERS = ("tool_calls", "tool_call_id", "function_call", "from", "value")
_ARGUMENTS = ("parameters", "args", "input")  # of a call, as others name them
_READ = frozenset(("role", "content", "parts", *THOUGHTS, *FLAGS, *_OTHERS))


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation, as chat templates know it.

    `tool_calls` are the calls of an assistant's message, in the form of OpenAI. A tool message may hold the call that it
    answers. Only templates that ask for calls before answers use it, so `to_dict` leaves it out. `reasoning` is what the
    assistant thought before it spoke, where it is not part of `content`. `learned` tells whether a demonstration trains on
    the message; None leaves this to its role. A tool message is `failed` if its call went wrong, whatever its text says;
    `seconds` is how long the call took, which no model reads.

    `parts` are the texts and pictures of a message with pictures, in order; `content` is then their texts as one. Use
    `showing` to make one. An assistant's message has no pictures.
    """

    role: str
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] | None = field(default=None, hash=False)  # unhashable
    tool_call_id: str | None = None
    reasoning: str = ""
    learned: bool | None = field(default=None, compare=False)
    failed: bool = False
    parts: tuple[Part, ...] = ()
    seconds: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise DataError(f"ChatMessage.role={self.role!r} is not accepted. Accepted: {', '.join(ROLES)}.")
        if not isinstance(self.content, str):
            raise DataError(f"ChatMessage.content must be a string, not {type(self.content).__name__}.")
        for part in self.parts:
            if not isinstance(part, str | Picture):
                raise DataError(f"A part is {part!r:.60}. Accepted: texts, and results of read_picture.")
        if _joined(self.parts) != self.content and self.parts:
            raise DataError(
                "ChatMessage.content must be the texts of its parts. Use ChatMessage.showing(...)."
            )
        if self.parts and self.role == "assistant":
            raise DataError("a message of the assistant has an image, and the policy writes text alone.")

    @classmethod
    def showing(cls, role: str, *parts: Part, **fields: Any) -> ChatMessage:
        """Return a message with pictures: ``ChatMessage.showing("user", "What colour is this?", picture)``."""
        texts = all(isinstance(part, str) for part in parts)
        return cls(role, _joined(parts), parts=() if texts else parts, **fields)

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures of the message, in order."""
        return tuple(part for part in self.parts if isinstance(part, Picture))

    @property
    def is_empty(self) -> bool:
        """Whether the message has no text, no pictures, no thought and no calls."""
        return not (self.content.strip() or self.reasoning.strip() or self.tool_calls or self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the form in which rows store it; empty fields are left out, as templates test for their presence."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls and self.role != "tool":
            row["tool_calls"] = [dict(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            row["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            row["reasoning_content"] = self.reasoning
        if self.learned is not None:
            row["weight"] = int(self.learned)
        if self.parts:
            row["parts"] = list(self.parts)
        return row

    def to_json(self) -> dict[str, Any]:
        """Return `to_dict` with pictures as data URIs, so that a file of rows needs no other files."""
        row = self.to_dict()
        if self.parts:
            row["parts"] = [part if isinstance(part, str) else part.to_part() for part in self.parts]
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any], picture: ReadPicture | None = None) -> ChatMessage:
        """Read a message in any known form; `picture` reads its images.

        Raises DataError for a missing role or content, for keys and values that are not read, all by name, for images if
        `picture` is None, and for other media.
        """
        if len(row) == 2 and row.get("role") in ROLES and type(row.get("content")) is str:
            return cls(row["role"], row["content"])
        fields = {key: value for key, value in row.items() if _is_given(value)}
        _check_keys(fields)
        role = _one_of(fields, ("role", "from"), lambda _, value: _ROLE_NAMES.get(str(value), str(value)))
        body = _one_of(fields, ("content", "value"), lambda _, value: value)
        body = row.get("content", row.get("value")) if body is None else body
        if role in ("function_call", "tool_call"):  # a message that is nothing but a call, as JSON text
            role, body, fields = "assistant", None, {**fields, "function_call": body}
        calls = _calls_of(fields, role)
        reasoning = _one_of(fields, THOUGHTS, lambda key, value: _joined(_parts(key, value, None))) or ""
        parts = tuple(_parts("content", fields.get("parts", body), picture))
        content = _joined(parts) if body is not None or parts else "" if calls or reasoning else None
        if content is None:
            raise DataError(f"the message has no content: {dict(row)!r:.200}.")
        if reasoning and role != "assistant":
            raise DataError(
                f"the message has a thought, but its role is {role!r}. Only the assistant thinks."
            )
        learned = _one_of(fields, FLAGS, _flag)
        call_id = fields.get("tool_call_id")
        return cls(
            role,
            content or "",
            calls or None,
            None if call_id is None else str(call_id),
            reasoning,
            learned,
            parts=parts if any(isinstance(part, Picture) for part in parts) else (),
        )


def read_arguments(value: Any, where: str = "arguments") -> dict[str, Any]:
    """Return an object that a data set stores as an object, as JSON text or as pairs of keys and values.

    Raises DataError for anything else; `where` names it.
    """
    if value is None or value == "":
        return {}
    items = read_json(value, where) if isinstance(value, str) else value
    items = _of_pairs(items) if isinstance(items, list | tuple) else items
    if not isinstance(items, Mapping):
        raise DataError(f"{where}={value!r:.100} is not accepted. Accepted: an object, or its JSON text.")
    return dict(items)


def read_json(text: str, where: str) -> Any:
    """Return what a JSON text holds; raise DataError, with `where` it is, for other texts and objects with equal keys."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {error}: {text[:60]!r}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise ValueError(f"an object has the key {key!r} twice")
        row[key] = value
    return row


def is_media(value: Any) -> bool:
    """Return whether a value of a column is a picture, video or sound, or several: data, an object, a file, an address."""
    if isinstance(value, list | tuple):
        return any(map(is_media, value))
    if isinstance(value, str):
        begins = value.startswith(("data:", "http://", "https://"))
        return begins or value.lower().rstrip("'\"]").endswith(_MEDIA_FILES) or is_encoded(value)
    if isinstance(value, Mapping):
        return any(_is_given(value.get(key)) for key in ("bytes", "path", "url", "array", "base64", *MEDIA))
    return value is not None and not isinstance(value, int | float)


def is_encoded(text: str) -> bool:
    """Return whether a text where a file is expected is a file's bytes in base64: it is too long for a path."""
    return len(text) > _LONGEST_PATH and _BASE64.fullmatch(text[:_LONGEST_PATH]) is not None


def _is_given(value: Any) -> bool:
    """Return whether a key says anything: null, an empty text or list, and an object of nulls do not."""
    if isinstance(value, Mapping):
        return any(item is not None for item in value.values())
    return value is not None and not (isinstance(value, str | list | tuple) and not value)


def _check_keys(given: Mapping[str, Any]) -> None:
    if media := [key for key in MEDIA if key in given]:
        raise DataError(f"the message has {media[0]!r}, {UNSEEN}")
    if unread := sorted(map(str, given.keys() - _READ - METADATA)):
        raise DataError(
            f"the message's keys {', '.join(map(repr, unread))} are not known. Accepted: {', '.join(sorted(_READ))}, and "
            "metadata such as id and name, which no model reads."
        )


def _joined(parts: Sequence[Part]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


def _parts(key: str, value: Any, picture: ReadPicture | None) -> list[Part]:
    """Return a text, or the texts and pictures of a list of parts."""
    if value is None or isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, list | tuple):
        raise DataError(f"{key} must be a string or a list of parts, not {value!r:.60}.")
    return [_part(key, part, picture) for part in value]


def _part(key: str, part: Any, picture: ReadPicture | None) -> Part:
    if isinstance(part, str | Picture):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS and isinstance(text, str) and not any(_is_given(part.get(name)) for name in MEDIA):
        return text
    if kind in _IMAGE_PARTS and picture is not None:
        stored = (part.get(name) for name in ("image_url", "image", "url", "path", "bytes", "base64"))
        return picture(next((value for value in stored if value is not None), None))
    raise DataError(f"{key} has a part of type {kind!r}: {part!r:.60}, {UNSEEN}")


def _one_of(given: Mapping[str, Any], keys: tuple[str, ...], read: Any) -> Any:
    """Return what keys of one meaning say, or None; raise DataError if they disagree."""
    values = {key: read(key, given[key]) for key in keys if key in given}
    if any(value != next_value for value, next_value in pairwise(values.values())):
        raise DataError(f"the message's keys {' and '.join(values)} mean the same, but differ. Keep one.")
    return next(iter(values.values()), None)


def _flag(key: str, value: Any) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise DataError(f"{key}={value!r:.60} is not accepted. Accepted: 0 (the message is not learned) or 1.")


def _calls_of(given: Mapping[str, Any], role: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the calls of a message, also one in the older form `function_call`."""
    stored, older = given.get("tool_calls"), given.get("function_call")
    if stored is None and older is None:
        return ()
    if role not in ("assistant", "tool"):
        raise DataError(f"the message has calls, but its role is {role!r}. Only the assistant calls tools.")
    if isinstance(stored, str):
        stored = read_json(stored, "tool_calls")
    if not isinstance(stored, list | tuple | None):
        raise DataError(f"tool_calls must be a list, not {stored!r:.60}.")
    calls = tuple(_call(call) for call in stored or ())
    if older is None:
        return calls
    legacy = _call(older if isinstance(older, Mapping) else read_arguments(older, "function_call"))
    if calls and legacy["function"] not in [call["function"] for call in calls]:
        raise DataError("tool_calls and function_call are different calls. Keep one of them.")
    return calls or (legacy,)


def _call(call: Any) -> dict[str, Any]:
    """Return a call in the form of OpenAI, with its arguments as an object."""
    whole = isinstance(call, Mapping) and call.get("function") is not None
    function = call["function"] if whole else call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"tool_calls has an item that is not a call with a name: {call!r:.100}.")
    fields = {key: value for key, value in function.items() if value is not None}
    misplaced = {key: fields.get(key) for key in _ARGUMENTS} | (
        {"arguments": call.get("arguments")} if whole else {}
    )
    if not _is_given(fields.get("arguments")) and any(map(_is_given, misplaced.values())):
        raise DataError(
            f"a call of {fields['name']!r} has its arguments in the wrong place: {call!r:.100}. Accepted: 'arguments' "
            "beside 'name'."
        )
    where = f"the arguments of a call of {fields['name']!r}"
    fields["arguments"] = read_arguments(fields.get("arguments"), where)
    if whole:
        return {
            key: fields if key == "function" else value for key, value in call.items() if value is not None
        }
    beside = {key: fields.pop(key) for key in ("id", "type") if key in fields}
    return {"type": "function"} | beside | {"function": fields}


def _of_pairs(items: Any) -> Any:
    """Return a mapping that a column of pairs stores, or the items if they are no pairs."""
    if all(isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str) for item in items):
        return dict(items)
    if all(isinstance(item, Mapping) and {*item} == {"key", "value"} for item in items):
        return {item["key"]: item["value"] for item in items}
    return items


def shortened(text: str, most: int, *, end: bool = False) -> str:
    """Return valid Unicode of at most `most` characters: the start of a longer text, or its `end`, with `CUT`."""
    if len(text) > most:
        size, mark = max(0, most - len(CUT)), CUT[:most]
        text = mark + text[len(text) - size :] if end else text[:size] + mark
    return text.encode(errors="replace").decode()


def after_thinking(text: str) -> str:
    """Return the reply after its thoughts: "" if it begins with a thought that never ends.

    Thoughts begin a reply, with a mark such as ``<think>`` or, where the prompt opened them, without it. They end at the
    first end outside quotes. A mark that a program, an argument or a sentence quotes is text like any other.

    >>> after_thinking("<think>a</think> b"), after_thinking('say("</think>")'), after_thinking("[THINK]a")
    (' b', 'say("</think>")', '')
    """
    return thought_and_answer(text)[1]


def thought_and_answer(text: str) -> tuple[str, str]:
    """Return the thoughts of a reply without their marks, and what follows them, see `after_thinking`."""
    thoughts, at = [], 0
    for _ in range(_MAX_QUOTED):
        start = len(text) - len(text[at:].lstrip())
        marks = ((begin.match(text, start), end) for begin, end in THOUGHT_MARKS)
        begun, end = next(((mark, mark.expand(end)) for mark, end in marks if mark), (None, _END))
        if at and not begun:
            break
        start = begun.end() if begun else at
        ends = islice(re.compile(end).finditer(text, start), _MAX_QUOTED)
        closed = next((match for match in ends if not _quoted(text, *match.span())), None)
        if not closed and begun:
            return text[start:], ""
        if not closed:
            break
        thoughts.append(text[start : closed.start()])
        at = closed.end()
    answer = _ANSWER.match(text, at)
    return "\n".join(thoughts), text[answer.end() if answer else at :]


def opened_thought(prompt: str) -> str:
    """Return the mark of a thought at the end of a prompt, with the white space behind it; "" if there is none."""
    marks = (re.search(rf"(?:{begin.pattern})\s*$", prompt) for begin, _ in THOUGHT_MARKS)
    return next((mark[0] for mark in marks if mark), "")


def _quoted(text: str, start: int, end: int) -> bool:
    """Return whether a quotation that opened on the same line is still open at `start`, and ends after `end`."""
    line = text[max(text.rfind("\n", 0, start) + 1, start - 2000) : start]
    rest = text[end : end + 2000].partition("\n")[0]
    opened = ""
    for quote in _QUOTE.findall(line):
        opened = "" if quote == opened else opened or quote
    return bool(opened) and opened in rest
