"""Render messages to token ids, and never render again what the policy sampled.

renderer = Renderer(tokenizer)
token_ids = renderer.first(messages)                                 # the prompt that the engine gets
token_ids += completion.token_ids                                    # exactly what it sampled
token_ids += renderer.following([reply], ended=True)                 # only what the reply adds
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import ConfigError, DataError, EnvError, TemplateError
from rl4llm.core.images import Picture
from rl4llm.core.message import UNSEEN, after_thinking, opened_thought, thought_and_answer
from rl4llm.core.types import ChatMessage, Completion, TokenSpan
from rl4llm.data.columns import TEMPLATE_ARGS, TOOLS, columns_key, read_tools
from rl4llm.data.messages import Frames, answering, roles_of, unusable
from rl4llm.data.probe import alike, objection, opening_objection, showing, whole_prompt
from rl4llm.data.template import ChatTemplate, Shape, decode, opening
from rl4llm.data.thoughts import check_thoughts, drops_thoughts
from rl4llm.data.written import sampled_end, stop_token_ids, written_turn

if TYPE_CHECKING:
    from rl4llm.data.vision import Vision

_KEPT = 512  # follow-ups whose tokens are kept


_Called = tuple[Shape, bool]
"""A shape, and whether the calls that its messages answer are known."""


class _Way(NamedTuple):
    """How messages of one shape are rendered after an answer."""

    template: ChatTemplate
    needs_history: bool


class Renderer:
    """Renders conversations append-only.

    New tokens begin at the end-of-turn token, which never merges with the text beside it. They are tokenized together with
    it, and it is dropped if the policy sampled it. So the ids are those that the tokenizer would give to the text in place,
    including the white-space rules of special tokens, whatever ids precede them.
    Text is never control: special tokens that a message contains are encoded as ordinary text, see `rl4llm.data.special`.

    The constructor probes the template with made-up conversations. Appended turns must read as in the template's rendering
    of the whole conversation, except where it strips or alters earlier answers, which stay as sampled. Otherwise it raises
    TemplateError with the reason.

    Args:
        tokenizer: with a chat template and a pad token.
        tools: JSON schemas for the template; refused if no prompt shows them.
        roles: the roles that speak after the policy's turns in this environment; () for a single turn. By default "user",
            and with tools also "tool". Other follow-ups are probed when they first occur.
        template_args: further variables of the template, e.g. ``{"enable_thinking": False}``.
        call_example: a call of the tool f with the argument x; with it, tools are described in the system prompt if the
            template does not show them.
        special_tokens: what special tokens in messages become: "escape", "refuse" or "allow", see `SpecialTokens`.
        thoughts: what becomes of thoughts that the template drops from earlier turns: "keep", "drop" or "refuse".
        vision: what the model makes of images; None refuses messages with images.

    Attributes:
        prompt_too_long: tells whether a first prompt has more tokens than a limit, see `Frames.too_long`.
        stop_token_ids: the tokens that end the policy's turn.
        dropping: the roles whose messages make the template drop the thoughts of turns before them.
    """

    @classmethod
    def of(cls, env: BaseMDPEnv, tokenizer: Any) -> Renderer:
        """Return a renderer for the conversations of an environment."""
        roles = env.reply_roles if env.max_steps > 1 else ()
        return cls(
            tokenizer,
            env.tool_schemas,
            roles,
            env.template_args,
            env.special_tokens,
            env.call_example,
            env.thoughts,
            env.vision,
        )

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        roles: Sequence[str] | None = None,
        template_args: Mapping[str, Any] | None = None,
        special_tokens: str = "escape",
        call_example: str = "",
        thoughts: str = "keep",
        vision: Vision | None = None,
    ):
        options = special_tokens, call_example, thoughts, vision
        self._with_args = lambda args: Renderer(tokenizer, tools, roles, args, *options)
        self._args, self._call_example = dict(template_args or {}), call_example
        self._template = showing(
            ChatTemplate(tokenizer, tools, template_args, special=special_tokens), call_example
        )
        self._of_columns = lru_cache(_KEPT)(self._with_columns)
        self._known: dict[_Called, _Way | str] = {}  # or why it cannot be done
        self._inherited: Mapping[_Called, _Way | str] = {}  # of the renderer without the tools of a row
        self.prompt_too_long = Frames(self._text, self.length).too_long
        self._latest: tuple[tuple[ChatMessage, ...], tuple[int, ...]] = ((), ())
        roles = tuple(roles) if roles is not None else ("user", "tool") if tools else ("user",)
        self._open(roles)
        self._base = [*opening(self._systems[0]), ChatMessage("assistant", "")]
        self._opened = opened_thought(self._template.generation_prompt(system=self._systems[0]))
        self.stop_token_ids = stop_token_ids(self._template, roles, self._ends_before_tools)
        # A follow-up has the same tokens after any answer, and follow-ups within a group are often equal.
        self._behind_any = lru_cache(_KEPT)(lambda template, new: self._behind(template, self._base, new))
        for role in roles:
            self._way((role,))
        self.thoughts, self._vision = thoughts, vision
        self.dropping = frozenset(role for role in roles if drops_thoughts(self._way((role,)).template, role))
        check_thoughts(self._template, thoughts, drops=bool(self.dropping))

    def of_row(self, row: Mapping[str, Any]) -> Renderer:
        """Return the renderer for a row: with its columns `tools` and `chat_template_kwargs`, or this one if it has none.

        Raises DataError if prompts show the tools of the environment already, and TemplateError if the template cannot show
        those of the row.
        """
        key = columns_key(row, self._template.shown_names)
        return self._of_columns(key) if key else self

    def _with_columns(self, columns: str) -> Renderer:
        tools, args = json.loads(columns)
        tools = read_tools(tools or [])
        if args:
            try:
                renderer = self._with_args({**self._args, **args})
            except ConfigError as error:
                raise DataError(f"the row's {TEMPLATE_ARGS}={args!r:.100}: {error}") from error
            return renderer.of_row({TOOLS: tools})
        renderer = copy.copy(self)
        renderer._template = showing(self._template.with_tools(tools), self._call_example)
        renderer._known, renderer._latest = {}, ((), ())
        renderer.prompt_too_long = Frames(renderer._text, renderer.length).too_long
        renderer._inherited = self._known
        renderer._open(())
        return renderer

    def _open(self, roles: Sequence[str]) -> None:
        """Find out which conversations the template can render; raise TemplateError if there are none."""
        self._openings = {system: self._refusal(roles, system=system) for system in (False, True)}
        self._systems = [system for system, reason in self._openings.items() if reason is None]
        if not self._systems:
            raise self._error(
                f"follow-ups by {' and '.join(roles)}" if roles else "prompts", self._openings[False]
            )

    def first(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of a first prompt, generation prompt included."""
        messages = tuple(messages)
        # the samples of a group ask for the same prompt in turn
        if not messages or self._latest[0] != messages:
            self._latest = messages, tuple(self.encode(self._text(messages)))
        return list(self._latest[1])

    def context(self, token_ids: Sequence[int], messages: Sequence[ChatMessage]) -> TokenSpan:
        """Return tokens that were rendered for new messages as a span in which the images of these messages have places.

        Raises TemplateError if the template has no placeholder for each, and DataError for images without `vision`.
        """
        vision = self._vision_for(pictures := _pictures(messages))
        if vision is None:
            return TokenSpan.context(tuple(token_ids))
        try:
            return vision.span(token_ids, pictures)
        except TemplateError as error:
            raise self._error("images", str(error)) from error

    def _vision_for(self, pictures: Sequence[Picture]) -> Vision | None:
        if pictures and self._vision is None:
            raise DataError(f"the messages have images, {UNSEEN}")
        return self._vision if pictures else None

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of a prompt as the template renders all of it, earlier turns of the policy too."""
        try:
            return self.encode(self._template.text(messages))
        except TemplateError as error:
            raise self._error("this conversation", str(error)) from error

    def following(
        self,
        new_messages: Sequence[ChatMessage],
        *,
        ended: bool,
        by: int | None = None,
        messages: Sequence[ChatMessage] = (),
    ) -> list[int]:
        """Return the tokens that follow a sampled turn: its end, the new messages and the next generation prompt.

        `ended` tells whether the policy sampled its end of turn, see `ends_turn`, and `by` with which token. Where the next
        role's token ends a turn, it is not repeated; another role's token stays, and the new messages follow it as a whole.
        `messages` is the conversation before the new messages; it is used only if the template's rendering of new messages
        depends on it.
        """
        runs = groupby(message.role for message in new_messages)
        shape = tuple(role for role, run in runs for _ in list(run)[:2])  # two of a role stand for more
        if not shape or shape[-1] == "assistant":
            raise EnvError(
                f"New messages must end with one to answer, not with roles {roles_of(new_messages)}."
            )
        new = tuple(answering(messages[-1:], new_messages))
        way = self._way(shape, called=any(item.role == "tool" and item.tool_calls for item in new))
        token_ids = (
            self._behind(way.template, messages, new)
            if way.needs_history
            else self._behind_any(way.template, new)
        )
        # the tokens begin with the end of the turn, so that they are tokenized as in place; what was sampled is not repeated
        cut = sampled_end(self._template, token_ids, by, self.stop_token_ids[0]) if ended else 0
        return list(token_ids[cut:])

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Return whether a completion ended its turn; a token limit, a stop string or another eos id leaves it open."""
        return bool(token_ids) and token_ids[-1] in self.stop_token_ids

    def content(self, completion_text: str) -> str:
        """Return a completion as the content of its message, with the thought that the generation prompt opened."""
        return self._opened + completion_text

    def reply(self, completion: Completion) -> ChatMessage:
        """Return a completion as a message; a thought whose marks are special tokens, which texts lack, is `reasoning`."""
        text, without = self._opened + self.decode(completion.token_ids), self._template.special.without
        thought, answer = map(without, thought_and_answer(text))
        if answer == after_thinking(without(text)):
            return ChatMessage("assistant", self.content(completion.text))
        return ChatMessage("assistant", answer, reasoning=thought)

    def completion_text(self, messages: Sequence[ChatMessage]) -> str:
        """Return the completion that gives the last of `messages`, without the end of turn: the inverse of `content`.

        It is what the template writes behind the generation prompt, see `written_turn`. `encode` resolves the marks of
        special tokens. Raises DataError if no completion gives this message.
        """
        return self._said(messages)[0]

    def completion(self, messages: Sequence[ChatMessage], new: Sequence[ChatMessage] = ()) -> list[int]:
        """Return the tokens of the completion that gives the last of `messages`, before `new`, with its end of turn."""
        text, end = self._said(messages)
        stop = self._template.tokenizer.convert_tokens_to_ids(end) if end else self.stop_token_ids[0]
        if self._template.end.next_role and new:
            stop = self.following(new, ended=False, messages=messages)[0]
        return [*self.encode(text), stop]

    @property
    def after_turn(self) -> list[int]:
        """Return the tokens that the template writes behind the end of the last turn, such as a line break."""
        end = self._template.end
        return [] if end.next_role else self.encode(end.closing.partition(end.token)[2])

    @property
    def notes(self) -> list[str]:
        """Return what a user should know about the template, a sentence each."""
        return sorted(self._template.notes)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of exactly `text`, without added special tokens; those that it contains count."""
        return self._template.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return decode(self._template.tokenizer, token_ids)

    def written(self, content: str) -> list[int]:
        """Return the token ids of an assistant's message that the policy did not sample."""
        return self.encode(self._template.special.marked(content, "assistant"))

    def special_tokens(self, messages: Sequence[ChatMessage]) -> int:
        """Return how many special tokens in messages become ordinary text."""
        return self._template.special.count(message.to_dict() for message in messages)

    @property
    def refuses_text(self) -> bool:
        """Whether a message with special tokens raises SpecialTokenError."""
        return self._template.special.mode == "refuse"

    def check(self, messages: Sequence[ChatMessage]) -> None:
        """Raise SpecialTokenError if messages contain special tokens and those are refused."""
        self._template.special.check(message.to_dict() for message in messages)

    def length(self, messages: Sequence[ChatMessage]) -> int:
        """Return the number of tokens of a first prompt; of images, only the headers are read."""
        vision = self._vision_for(pictures := _pictures(messages))
        return len(self.first(messages)) + sum(vision.count(picture) - 1 for picture in pictures if vision)

    def _behind(
        self, template: ChatTemplate, history: Sequence[ChatMessage], new: tuple[ChatMessage, ...]
    ) -> tuple[int, ...]:
        """Return the tokens from the end of an answer on."""
        try:
            return tuple(self.encode("".join(template.split_end(template.after_reply(history, new)))))
        except TemplateError as error:
            raise self._error(f"follow-ups {roles_of(new)}", str(error)) from error

    def _said(self, messages: Sequence[ChatMessage]) -> tuple[str, str]:
        return written_turn(self._template, self._text(messages[:-1]), messages, self._opened)

    def _text(self, messages: Sequence[ChatMessage]) -> str:
        if not messages or messages[-1].role == "assistant":
            raise DataError(
                f"A prompt must end with a message to answer, not with roles {roles_of(messages)}."
            )
        system = any(message.role == "system" for message in messages)
        if self._openings[system] is not None:
            raise self._error(
                f"conversations with{'' if system else 'out'} a system prompt", self._openings[system]
            )
        try:
            return whole_prompt(self._template, messages)
        except TemplateError as error:
            raise self._error("this conversation", str(error)) from error

    def _refusal(self, roles: Sequence[str], *, system: bool) -> str | None:
        reason = opening_objection(self._template, system=system)
        for role in roles:
            for template in (self._template, *([self._template.calling()] if role == "tool" else [])):
                objections = reason or objection(template, (role,), system=system)
                if not objections:
                    break
            reason = objections
        return reason

    def _way(self, shape: Shape, *, called: bool = False) -> _Way:
        """Return how messages of a shape are rendered; `called` tells whether the calls that they answer are known."""
        if (shape, called) not in self._known:
            self._known[shape, called] = self._inherited_way(shape, called) or self._probe(
                shape, called=called
            )
        way = self._known[shape, called]
        if isinstance(way, str):
            raise self._error(f"follow-ups [{', '.join(shape)}]", way)
        return way

    def _inherited_way(self, shape: Shape, called: bool) -> _Way | None:
        """Return how the renderer without the tools of a row renders a shape, if these tools change nothing there."""
        way = self._inherited.get((shape, called))
        if not isinstance(way, _Way) or way.needs_history:
            return None
        template = self._template.calling() if way.template.calls else self._template
        return way if alike(way.template, template, shape, self._base) else None

    def _probe(self, shape: Shape, *, called: bool) -> _Way | str:
        """Return how messages of a shape are rendered, or why they cannot be.

        Answers of tools follow calls in the assistant's message if the template refuses them otherwise, and also if the
        calls are known and the template shows something of them, such as their ids.
        """
        plain = self._probed(self._template, shape)
        if shape[0] != "tool" or not (called or isinstance(plain, str)):
            return plain
        calling = self._template.calling()
        if not isinstance(plain, str) and alike(self._template, calling, shape, self._base):
            return plain
        linked = self._probed(calling, shape)
        return plain if isinstance(linked, str) and not isinstance(plain, str) else linked

    def _probed(self, template: ChatTemplate, shape: Shape) -> _Way | str:
        # A follow-up that reads the same behind a made-up answer as behind the real one is rendered once for all answers.
        # Only templates that look back need the whole conversation each turn.
        for base in (self._base, None):
            reasons = [objection(template, shape, system=system, base=base) for system in self._systems]
            if not any(reasons):
                return _Way(template, True) if base is None else _Way(self._lightest(template, shape), False)
        return next(reason for reason in reasons if reason)

    def _lightest(self, template: ChatTemplate, shape: Shape) -> ChatTemplate:
        """Return the template without tools if they change nothing after an answer: rendering schemas is slow."""
        try:
            bare = template.without_tools()
        except TemplateError:  # one of several templates, which asks for tools
            return template
        return bare if alike(bare, template, shape, self._base) else template

    def _ends_before_tools(self) -> list[str]:
        """Return the tokens that end a turn that answers of tools follow, without white space between."""
        try:
            way = self._way(("tool",), called=True)
            if not (way.template.calls or self._template.end.next_role):
                return []
            tail = way.template.after_reply(self._base, [ChatMessage("tool", "")])
            return [way.template.split_end(tail)[0]]
        except (TemplateError, EnvError):
            return []

    def _error(self, what: str, reason: str | None) -> TemplateError:
        return unusable(self._template.name, what, reason)


def _pictures(messages: Sequence[ChatMessage]) -> list[Picture]:
    return [picture for message in messages for picture in message.pictures]
