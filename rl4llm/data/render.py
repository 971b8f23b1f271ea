"""From messages to token ids, without ever rendering again what the policy sampled.

    renderer = Renderer(tokenizer)
    token_ids = renderer.first(messages)                                 # what the engine is asked with
    token_ids += completion.token_ids                                    # exactly what it sampled
    token_ids += renderer.following([reply], ended=True)                 # only what the reply adds
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from rl4llm.core.errors import ConfigError, DataError, EnvError, TemplateError
from rl4llm.core.types import ROLES, ChatMessage
from rl4llm.data.template import ChatTemplate, Shape, alike, objection, opening, opening_objection

_MAX_EXPANSION = 11  # bytes per byte under Unicode normal form KC, the most that a tokenizer's normalizer makes of a text
_KEPT = 512  # follow-ups whose tokens are kept


class _Way(NamedTuple):
    """How messages of one shape are rendered behind an answer."""

    template: ChatTemplate
    needs_history: bool


class Renderer:
    """Renders conversations append-only.

    New tokens begin at the end-of-turn token, which is a token of its own whatever stands beside it: they are tokenised
    together with it, and it is dropped where the policy has sampled it. So the ids are those that the tokenizer would give
    to that text in place, white-space rules of special tokens included, and ids before them can be anything at all.
    Special tokens written out in a message count as such, as everywhere in transformers.

    At construction the template is probed with made-up conversations: appended turns must read as in the template's own
    rendering of the whole, except where it strips or alters earlier answers, which stay as sampled. Otherwise TemplateError
    gives the reason.

    Args:
        tokenizer: with a chat template and a pad token.
        tools: JSON schemas for the template; refused when the template does not show them.
        roles: who speaks after the policy's turns in this environment; () for a single turn. By default "user", and "tool"
            where there are tools. Other follow-ups are probed when they first come.
        template_args: further variables of the template, e.g. ``{"enable_thinking": False}``.

    Attributes:
        stop_token_ids: the tokens that end the policy's turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        roles: Sequence[str] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ):
        self._template = ChatTemplate(tokenizer, tools, template_args)
        self._known: dict[Shape, _Way | str] = {}  # or why it cannot be done
        self._frames: dict[Shape, int | None] = {}
        self._latest: tuple[tuple[ChatMessage, ...], tuple[int, ...]] = ((), ())
        roles = tuple(roles) if roles is not None else ("user", "tool") if tools else ("user",)
        unknown_roles = set(roles) - set(ROLES)
        if unknown_roles:
            raise ConfigError(f"roles={roles!r}: {min(unknown_roles)!r} is not accepted. Accepted: {', '.join(ROLES)}.")
        self._openings = {system: self._refusal(roles, system=system) for system in (False, True)}
        self._systems = [system for system, reason in self._openings.items() if reason is None]
        if not self._systems:
            raise self._error(f"follow-ups by {' and '.join(roles)}" if roles else "prompts", self._openings[False])
        self._base = [*opening(self._systems[0]), ChatMessage("assistant", "")]
        self._opened = _open_thought(self._template.generation_prompt(system=self._systems[0]))
        self.stop_token_ids = self._stop_token_ids()
        # The same follow-up behind any answer is the same tokens, and those of a group are often alike.
        self._behind_any = lru_cache(_KEPT)(lambda template, new: self._behind(template, self._base, new))
        for role in roles:
            self._way((role,))

    def first(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The tokens of a first prompt, generation prompt included."""
        messages = tuple(messages)
        if not messages or self._latest[0] != messages:  # the samples of a group ask one after the other
            self._latest = messages, tuple(self.encode(self._text(messages)))
        return list(self._latest[1])

    def following(
        self, new_messages: Sequence[ChatMessage], *, ended: bool, messages: Sequence[ChatMessage] = ()
    ) -> list[int]:
        """The tokens to append to what the policy sampled: close its turn, the new messages, the next generation prompt.

        `ended` says whether the policy sampled its end of turn itself, see `ends_turn`. `messages` is the conversation
        before the new ones, read only where the template's rendering of new messages depends on it.
        """
        shape = _shape(new_messages)
        if not shape or shape[-1] == "assistant":
            raise EnvError(f"New messages must end with one to answer; their roles are {_roles(new_messages)}.")
        way, new = self._way(shape), tuple(new_messages)
        token_ids = self._behind(way.template, messages, new) if way.needs_history else self._behind_any(way.template, new)
        return list(token_ids[1:] if ended else token_ids)

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Whether a completion ended its turn itself: a token limit or a stop string leaves it open."""
        return bool(token_ids) and token_ids[-1] in self.stop_token_ids

    def content(self, completion_text: str) -> str:
        """What the policy said, as the content of its message: a thought that the generation prompt opened included."""
        return self._opened + completion_text

    def completion_text(self, messages: Sequence[ChatMessage]) -> str:
        """What a policy must sample to say the last of `messages`, the inverse of `content`; the end of turn is left out.

        Tool calls are written as the template writes them. Raises DataError where no completion could have said it.
        """
        *history, message = messages
        if message.tool_calls:
            return self._calling_text(history, message)
        if not message.content.startswith(self._opened):
            raise DataError(
                f"The generation prompt opens {self._opened!r}, but message {len(history)}, the assistant's, begins with "
                f"{message.content[:30]!r}. Next step: give the message its thought, {self._opened!r} included, or switch "
                "thinking off in the template's arguments, where it can be."
            )
        return message.content.removeprefix(self._opened)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands: nothing is added in front or behind."""
        return self._template.encode(text)

    def prompt_too_long(self, messages: Sequence[ChatMessage], limit: int) -> int | None:
        """The number of tokens of a first prompt if it is more than `limit`, else None.

        A token covers at least one byte, so most prompts are seen to be short enough without being rendered.
        """
        frame = self._frame_bytes(messages)
        if frame is not None and frame + sum(_most_bytes(message.content) for message in messages) <= limit:
            return None
        count = len(self.first(messages))
        return count if count > limit else None

    def _behind(
        self, template: ChatTemplate, history: Sequence[ChatMessage], new: tuple[ChatMessage, ...]
    ) -> tuple[int, ...]:
        """The tokens behind an answer, from its end on."""
        try:
            return tuple(self.encode("".join(template.split_end(template.after_reply(history, new)))))
        except TemplateError as error:
            raise self._error(f"follow-ups {_roles(new)}", str(error)) from error

    def _calling_text(self, history: Sequence[ChatMessage], message: ChatMessage) -> str:
        prompt, whole = self._text(history), self._template.text([*history, message], prompt=False).rstrip()
        end = self._template.tokenizer.convert_ids_to_tokens(self.stop_token_ids[0])
        said = whole.removeprefix(prompt).removesuffix(end)
        reason: str | None
        if not whole.startswith(prompt):
            reason = f"it renders the turn in another way than behind the generation prompt, which ends in {prompt[-40:]!r}"
        elif not whole.endswith(end):
            reason = f"the turn does not end in {end!r} but in {whole[-40:]!r}"
        else:
            reason = _lost(message, self.content(said))
        if reason:
            raise DataError(
                f"The chat template of {self._template.name} cannot be used for the tool calls of message {len(history)}: "
                f"{reason}. Next step: write the calls into the message's content, as the policy is to say them."
            )
        return said

    def _text(self, messages: Sequence[ChatMessage]) -> str:
        if not messages or messages[-1].role == "assistant":
            raise DataError(f"A prompt must end with a message to answer; its roles are {_roles(messages)}.")
        system = any(message.role == "system" for message in messages)
        if self._openings[system] is not None:
            raise self._error(f"conversations with{'' if system else 'out'} a system prompt", self._openings[system])
        try:
            return self._template.text(messages)
        except TemplateError as error:
            raise self._error("this conversation", str(error)) from error

    def _refusal(self, roles: Sequence[str], *, system: bool) -> str | None:
        reason = opening_objection(self._template, system=system)
        for role in roles:
            reason = reason or objection(self._template, (role,), system=system)
        return reason

    def _way(self, shape: Shape) -> _Way:
        if shape not in self._known:
            self._known[shape] = self._probe(shape)
        known = self._known[shape]
        if isinstance(known, str):
            raise self._error(f"follow-ups [{', '.join(shape)}]", known)
        return known

    def _probe(self, shape: Shape) -> _Way | str:
        for base in (self._base, None):
            reasons = [objection(self._template, shape, system=system, base=base) for system in self._systems]
            if not any(reasons):
                return _Way(self._template, True) if base is None else _Way(self._lightest(shape), False)
        return next(reason for reason in reasons if reason)

    def _lightest(self, shape: Shape) -> ChatTemplate:
        """The template without the tools where these change nothing behind an answer: their schemas take long to render."""
        try:
            bare = self._template.without_tools()
        except TemplateError:  # one of several templates, which asks for tools
            return self._template
        return bare if alike(bare, self._template, shape, self._base) else self._template

    def _stop_token_ids(self) -> tuple[int, ...]:
        tokenizer = self._template.tokenizer
        stops = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        try:
            stops = [tokenizer.convert_tokens_to_ids(self._template.final_end(system=self._systems[0])), *stops]
        except TemplateError as error:
            if not stops:
                raise self._error("any conversation, as the tokenizer has no eos token either", str(error)) from error
        waiting = self._template.waiting_end()
        return tuple(dict.fromkeys([*stops, *([tokenizer.convert_tokens_to_ids(waiting)] if waiting else [])]))

    def _frame_bytes(self, messages: Sequence[ChatMessage]) -> int | None:
        """Bytes of a rendering less its contents; None where contents do not simply stand in it."""
        shape = tuple(message.role for message in messages)
        if not set(shape) <= {"system", "user"}:
            return None
        if shape not in self._frames:
            made_up = [ChatMessage(role, f"ProbeContent{number}End") for number, role in enumerate(shape)]
            text = self._text(made_up)
            stand_once = all(text.count(message.content) == 1 for message in made_up)
            contents = sum(len(message.content) for message in made_up)
            self._frames[shape] = _most_bytes(text) - contents if stand_once else None
        return self._frames[shape]

    def _error(self, what: str, reason: str | None) -> TemplateError:
        return TemplateError(
            f"The chat template of {self._template.name} cannot be used for {what}: {reason}. Accepted: templates whose "
            "rendering of a conversation grows only at its end. Next step: give the tokenizer another chat template "
            "(tokenizer.chat_template = ...), or choose an environment without such messages."
        )


def _lost(message: ChatMessage, said: str) -> str | None:
    """What of a message with tool calls is not in its rendering as it should be; None when everything is."""
    if _without_space(message.content) not in _without_space(said):
        return f"it leaves out or alters {message.content[:40]!r}"
    functions = [call.get("function") or call for call in message.tool_calls or ()]
    for name, count in Counter(str(function.get("name")) for function in functions).items():
        if said.count(name) < count:
            return f"it leaves out a call of {name!r}"
    for function in functions:
        arguments = function.get("arguments")
        if isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False) in said:
            return f"it quotes the arguments {arguments[:40]!r}, which are a text here; make them an object"
    return None


def _without_space(text: str) -> str:
    return "".join(text.split())


def _shape(messages: Sequence[ChatMessage]) -> Shape:
    """Roles of the messages, runs of one role cut to two."""
    return tuple(role for role, run in groupby(message.role for message in messages) for _ in list(run)[:2])


def _roles(messages: Sequence[ChatMessage]) -> str:
    return f"[{', '.join(message.role for message in messages)}]"


def _most_bytes(text: str) -> int:
    """The most bytes that a tokenizer's normalizer can make of `text`, and so the most tokens."""
    return len(text) if text.isascii() else _MAX_EXPANSION * len(text.encode())


def _open_thought(generation_prompt: str) -> str:
    opened = re.search(r"<think>\s*$", generation_prompt)
    return opened.group() if opened else ""
