"""A chat template as text: what it renders, and how it closes a turn."""

from __future__ import annotations

import copy
import inspect
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from typing import Any, NamedTuple

import jinja2
from transformers.utils import chat_template_utils

from rl4llm.core.errors import ConfigError, EnvError, ModelError, TemplateError
from rl4llm.core.types import ChatMessage
from rl4llm.data.messages import (
    CallForm,
    description,
    found_call_form,
    marked,
    plain,
    shown_message,
    shows_reasoning,
    unread_args,
    with_description,
)
from rl4llm.data.special import SpecialTokens, any_of, encoded, framed

Shape = tuple[str, ...]
"""The roles of the messages between two turns of the policy, e.g. ("tool", "tool")."""

PINNED_DAY = datetime(2025, 1, 1)
ANOTHER_DAY = datetime(2031, 10, 17, 19, 43, 58)
_WAITING_END = "<|eom_id|>"
_REPLY = "ProbeReplyOfThePolicy"
_FOLLOW_UP = "ProbeFollowUp"
_DIRECTIVES = "aAbBdmyYHIMSpjcxXZ"
MADE_UP_CALL = {"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": {}}}
_RENDERING_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, jinja2.TemplateError)  # fmt: skip


class TurnEnd(NamedTuple):
    """How the assistant's turn ends.

    `closing` is what the template writes behind the answer at the end of a conversation, from its first token on. The policy
    samples `token` to end its turn. If `next_role` is set, the template writes no end: the turn ends with the token that
    begins the next message.
    """

    closing: str
    token: str
    next_role: bool = False


class ChatTemplate:
    """The chat template of a tokenizer, with tools and arguments filled in; everything here is text.

    Transformers compiles it once. It renders what `apply_chat_template` would, without processing tools and arguments again
    for every text.
    Templates that write today's date get 1 January 2025 instead, so that a prompt has the same tokens on every day.
    In its renderings, marks stand for the special tokens that messages or tools contain, see `special`; `encode` knows them.
    Raises ModelError for a tokenizer that cannot be used, TemplateError for a missing template, and ConfigError for
    arguments that the template cannot have.

    Attributes:
        calls: whether the answers of tools follow `tool_calls` in the assistant's message, with their ids, see `calling`.
        described: the description of tools that each prompt has because the template does not show their schemas.
    """

    calls = False
    described, _in_system = "", True
    _described_tools: Sequence[Mapping[str, Any]] = ()

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        day: datetime = PINNED_DAY,
        special: SpecialTokens | str = "escape",
    ):
        self.tokenizer = tokenizer
        self.tools = [dict(tool) for tool in tools] if tools else None
        self.name = f"{tokenizer.name_or_path or 'unnamed'} ({type(tokenizer).__name__})"
        self._args = dict(template_args or {})
        source = framed(self._checked_source(), tokenizer)
        self.tells_time = "strftime_now" in source
        if self.tells_time:  # shadow the template's clock by a macro that always tells the same time
            filters = "".join(
                f".replace('%{letter}', '{day.strftime('%' + letter)}')" for letter in _DIRECTIVES
            )
            source = f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{source}"
        self._source = source
        self.notes = unread_args(self._args, source)  # what users should know; probes add more
        self.losses: dict[Any, str | None] = {}  # what prompts of each form lose, see `whole_prompt`
        parameters = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {
            "documents",
            "kwargs",
        }
        if names := parameters.intersection(self._args):
            raise ConfigError(
                f"env.template_args: {names} are parameters of apply_chat_template, not variables."
            )
        self._variables = {"documents": None, **tokenizer.special_tokens_map, **plain(self._args)}
        self.special = (
            SpecialTokens(tokenizer, self._rendered, special) if isinstance(special, str) else special
        )
        self._shown_tools = self.special.marked_data(plain(self.tools))
        self._added = frozenset(tokenizer.get_added_vocab())
        self._added_lengths = sorted(set(map(len, self._added)), reverse=True)

    def text(self, messages: Sequence[ChatMessage], *, prompt: bool = True) -> str:
        """Return the template's rendering, with the generation prompt at its end if `prompt` is set.

        Raises TemplateError with the template's message if it refuses the messages.
        """
        rows = [self.special.marked_row(self._shown(message)) for message in messages]
        if self.described:
            rows = with_description(rows, self.described, in_system=self._in_system)
        try:
            return self._compiled.render(
                self._variables, messages=rows, tools=self._shown_tools, add_generation_prompt=prompt
            )
        except _RENDERING_ERRORS as error:
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(f"the template refuses the roles [{roles}]: {error}") from error

    def _shown(self, message: ChatMessage) -> dict[str, Any]:
        """Return a message as this template reads it; raise TemplateError for a thought that it does not render."""
        if message.reasoning and not self._shows_reasoning:
            raise TemplateError(
                "the template does not render a thought beside the content. Put it into the content"
            )
        return shown_message(message, self._call_form if message.tool_calls else None)

    def after_reply(
        self, history: Sequence[ChatMessage], new: Sequence[ChatMessage], *, prompt: bool = True
    ) -> str:
        """Return what follows the turn of the last message of `history`, the policy's, once `new` is appended.

        It follows the message's text, or its calls if it has any.
        """
        if not history or history[-1].role != "assistant":
            raise EnvError(
                f"{self.name}: `messages` must end with the assistant's message that new messages follow."
            )
        mark = _REPLY
        while any(mark in message.content for message in (*history, *new)):
            mark += "Again"
        messages, place = self.linked([*history, *new]), len(history) - 1
        called = bool(messages[place].tool_calls)
        messages[place] = marked(messages[place], mark)
        _, match, tail = self.text(messages, prompt=prompt).rpartition(mark)
        if not match:
            raise TemplateError("the template leaves out what the assistant said")
        return self.after_calls(messages[: place + 1], tail, mark) if called else tail

    def after_calls(self, turn: Sequence[ChatMessage], tail: str, mark: str) -> str:
        """Return what follows the calls of a turn, whose last arguments hold `mark`; `tail` is all behind that mark."""
        rest = self.text(turn, prompt=False).rpartition(mark)[2].rstrip()
        closing, token, next_role = self.end
        stop = self.tokenizer.eos_token or token
        if closing and rest.endswith(closing.rstrip()):
            rest = rest.removesuffix(closing.rstrip())
        elif not next_role:  # calls may have another end of turn
            ends = [token, stop, *self.tokens(rest)[-1:]]
            rest = rest.partition(next(end for end in ends if end in rest))[0] if ends[2:] else rest
        if not tail.startswith(rest):
            raise TemplateError(f"behind calls it writes {rest[-40:]!r}, but {tail[:40]!r} if answers follow")
        return tail[len(rest) :]

    def without_end(self, whole: str, *, called: bool) -> tuple[str, str | None]:
        """Return a conversation without the end of its last turn, the assistant's, and the token that ends this turn.

        The token is "" if the template writes none, and None if the turn ends in another way. Calls may have another end.
        """
        closing, token, _ = self.end
        if closing and whole.endswith(closing.rstrip()):
            return whole.removesuffix(closing[closing.index(token) :].rstrip()), token
        ends = [token, self.tokenizer.eos_token, *self.tokens(whole)[-1:]] if called else []
        stop = next((end for end in ends if end and whole.endswith(end)), None)
        if not closing and stop != token:  # the last token belongs to the calls
            return whole, ""
        return whole.removesuffix(stop or ""), stop

    def linked(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the messages with the calls that tool messages answer in the assistant's message before them, and with ids.

        Only if `calls` is set, and for assistant messages without calls; their text, which has the calls as the policy wrote
        them, is left out. Calls that are unknown are made up.
        """
        rows, turn = list(messages), -1
        for number, message in enumerate(messages if self.calls else ()):
            if message.role == "assistant":
                turn = -1 if message.tool_calls else number
            elif message.role != "tool":
                turn = -1
            elif turn >= 0:
                calls = rows[turn].tool_calls or ()
                call = (message.tool_calls or ({**MADE_UP_CALL, "id": f"call{number:05}"},))[0]
                rows[turn] = ChatMessage("assistant", "", (*calls, call))
                rows[number] = ChatMessage(
                    "tool",
                    message.content,
                    tool_call_id=message.tool_call_id or call["id"],
                    parts=message.parts,
                )
        return rows

    def split_end(self, tail: str) -> tuple[str, str]:
        """Return the end-of-turn token that `tail` starts with, and the text after that token.

        White space before the token is dropped: the policy decides whether to write it.
        """
        text = tail.lstrip()
        length = next((length for length in self._added_lengths if text[:length] in self._added), None)
        if length is None:
            raise TemplateError(f"no end-of-turn token follows what the assistant said, but {tail[:40]!r}")
        return text[:length], text[length:]

    @cached_property
    def end(self) -> TurnEnd:
        """How the assistant's turn ends, as a trained model samples it. Raises TemplateError if no token ends it."""
        for system in (False, True):
            try:
                return self._end(opening(system))
            except TemplateError as error:
                refusal = error
        raise refusal

    def tokens(self, text: str) -> list[str]:
        """Return the added tokens in a text, in order."""
        return self._token_pattern.findall(text)

    def begins_with_token(self, text: str) -> bool:
        """Return whether a text begins with an added token, after white space."""
        return bool(self._token_pattern.match(text.lstrip()))

    def shared(self, one: str, other: str) -> str:
        """Return the longest common beginning of two texts that ends within no added token."""
        size = min(len(one), len(other))
        if one[:size] != other[:size]:
            size = bisect_left(range(size), True, key=lambda last: one[: last + 1] != other[: last + 1])
        longer = (text for text in (one, other) if len(text) > size)
        spans = [match.span() for text in longer for match in self._token_pattern.finditer(text)]
        return one[: min([size, *(start for start, stop in spans if start < size < stop)])]

    def waiting_end(self) -> str | None:
        """Return the token by which Llama 3.1 and later end a turn that waits for a tool; None for other templates."""
        return _WAITING_END if _WAITING_END in self._source and _WAITING_END in self._added else None

    def generation_prompt(self, *, system: bool) -> str:
        """Return what the template adds to ask for an assistant's turn, such as a header and "<think>"."""
        messages = opening(system)
        return self.text(messages).removeprefix(self.text(messages, prompt=False))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of exactly `text`, without added special tokens."""
        if self.special.stand_in(text):
            return self.special.encode(text)
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        if fast is None or fast.truncation or fast.padding:  # which the tokenizer's own call switches off
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        return encoded(fast, text)

    def on_another_day(self) -> ChatTemplate:
        """Return the same template with a later date."""
        return self._again(self.tools, ANOTHER_DAY)

    def without_tools(self) -> ChatTemplate:
        return self._again(None) if self.tools else self

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        return self._again(tools)

    def _again(self, tools: Sequence[Mapping[str, Any]] | None, day: datetime = PINNED_DAY) -> ChatTemplate:
        template = ChatTemplate(self.tokenizer, tools, self._args, day, self.special)
        template.calls, template.notes = self.calls, self.notes
        return template

    @property
    def shown_names(self) -> list[str]:
        """The names of the tools that prompts show."""
        return [
            str((tool.get("function") or tool).get("name")) for tool in self.tools or self._described_tools
        ]

    def calling(self) -> ChatTemplate:
        """Return the same template for answers of tools that follow `tool_calls` in the assistant's message."""
        template = copy.copy(self)
        template.calls = True
        return template

    def describing(self, example: str) -> ChatTemplate:
        """Return the same template with its tools described in the system prompt, or in the first message if it has none."""
        template = copy.copy(self.without_tools())
        rows = [message.to_dict() for message in opening(system=True)]
        text = self._rendered(rows, prompt=True) or ""
        template._in_system = all(row["content"] in text for row in rows)
        schemas = [json.dumps(tool, ensure_ascii=False) for tool in self.tools or ()]
        template._described_tools = self.tools or ()
        template.described = description(
            [self.special.marked(schema, "system") for schema in schemas], example
        )
        return template

    def _end(self, asked: Sequence[ChatMessage]) -> TurnEnd:
        turn = [*asked, probe_reply(0)]
        closing = self.after_reply(turn, [], prompt=False).lstrip()
        try:
            middle = self.after_reply(turn, [ChatMessage("user", _FOLLOW_UP)]).lstrip()
        except TemplateError:
            middle = ""
        if not self.begins_with_token(closing):
            end, rest = self.split_end(middle)
            header = (end + rest).partition(_FOLLOW_UP)[0]
            before = self.text(asked, prompt=False).partition(asked[-1].content)[0]
            return TurnEnd("", end, next_role=before.endswith(header))
        whole = self.text(turn, prompt=False)
        answer, tokens = whole[len(self.shared(whole, self.text(asked))) :], self.tokens(closing)
        alone = (
            token
            for token in tokens
            if answer.count(token) == 1 and closing.partition(token)[0] + token in middle
        )
        return TurnEnd(closing, next(alone, tokens[0]))

    @cached_property
    def _token_pattern(self) -> re.Pattern[str]:
        return any_of(self._added)

    def _rendered(
        self, rows: Sequence[Mapping[str, Any]], *, prompt: bool = False, tools: Any = None
    ) -> str | None:
        try:
            return self._compiled.render(
                self._variables, messages=rows, tools=tools, add_generation_prompt=prompt
            )
        except _RENDERING_ERRORS:
            return None

    @cached_property
    def _call_form(self) -> CallForm:
        """Find the form in which the template reads calls of tools."""
        return found_call_form(partial(self._rendered, tools=self._shown_tools))

    @cached_property
    def _shows_reasoning(self) -> bool:
        """Find out whether the template renders thoughts."""
        return shows_reasoning(partial(self._rendered, tools=self._shown_tools))

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return chat_template_utils._compile_jinja_template(self._source)

    def _checked_source(self) -> str:
        if self.tokenizer.pad_token_id is None:
            raise ModelError(
                f"The tokenizer {self.name} has no pad token. Set one that it already has, for example model.pad_token="
                f"{self.tokenizer.eos_token or '<|endoftext|>'!r}."
            )
        try:
            return self.tokenizer.get_chat_template(tools=self.tools)
        except ValueError as error:
            reason = "Take the model's instruct version, or set tokenizer.chat_template and save the tokenizer again."
            raise TemplateError(
                f"The tokenizer {self.name} has no default chat template. {reason}"
            ) from error


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of tokens, with special tokens and without clean-up."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return fast.decode(token_ids, skip_special_tokens=False)


def opening(system: bool) -> list[ChatMessage]:
    """Return a made-up first prompt."""
    question = [ChatMessage("user", "ProbeOpeningQuestion")]
    return [ChatMessage("system", "ProbeSystemPrompt"), *question] if system else question


def probe_name(number: int) -> str:
    """Return what the policy says in a made-up turn."""
    return f"{_REPLY}{number}End"


def probe_reply(number: int, *, thinks: bool = False) -> ChatMessage:
    """Return a made-up turn of the policy."""
    thought = f"<think>\nProbeThought{number}End\n</think>\n\n" if thinks else ""
    return ChatMessage("assistant", thought + probe_name(number))
