"""A chat template as text: what it renders, how it closes a turn, and the proof that a conversation can be extended.

Each answer of the policy stays as it was sampled, so a template is only ever asked for what comes *after* an answer. That
is sound when the text after an answer does not depend on the answer, and stays the same when the conversation goes on.
`objection` finds out by rendering made-up conversations both ways.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import numpy as np
from transformers.utils import chat_template_utils

from rl4llm.core.errors import ConfigError, EnvError, ModelError, TemplateError
from rl4llm.core.types import ChatMessage

Shape = tuple[str, ...]
"""The roles of the messages between two turns of the policy, e.g. ("tool", "tool")."""

PINNED_DAY = datetime(2025, 1, 1)
ANOTHER_DAY = datetime(2031, 10, 17, 19, 43, 58)
_WAITING_END = "<|eom_id|>"
_REPLY = "ProbeReplyOfThePolicy"
_DIRECTIVES = "aAbBdmyYHIMSpjcxXZ"
_BARE: Mapping[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}  # of subclasses
_RENDERING_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)


class ChatTemplate:
    """The chat template of a tokenizer, with tools and arguments filled in; everything here is text.

    It is compiled once, by transformers, and renders what `apply_chat_template` would, without going through the tools and
    the arguments again for every text.
    Templates that write today's date are given 1 January 2025 instead, so that a prompt is the same tokens on every day.
    Raises ModelError for a tokenizer that cannot be used, TemplateError where there is no template, and ConfigError for
    arguments that are not the template's.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        day: datetime = PINNED_DAY,
    ):
        self.tokenizer = tokenizer
        self.tools = [dict(tool) for tool in tools] if tools else None
        self.name = f"{tokenizer.name_or_path or 'unnamed'} ({type(tokenizer).__name__})"
        self._args = dict(template_args or {})
        source = self._checked_source()
        self.tells_time = "strftime_now" in source
        self._source = _pin_clock(source, day) if self.tells_time else source
        self._variables = {"documents": None, **tokenizer.special_tokens_map, **_plain(self._checked_args())}
        self._shown_tools = _plain(self.tools)
        self._added = frozenset(tokenizer.get_added_vocab())
        self._added_lengths = sorted(set(map(len, self._added)), reverse=True)

    def text(self, messages: Sequence[ChatMessage], *, prompt: bool = True) -> str:
        """The template's own rendering; `prompt` asks for the generation prompt at its end.

        Raises TemplateError with the template's own words when it refuses the messages.
        """
        rows = [_row(message) for message in messages]
        try:
            return self._compiled.render(
                self._variables, messages=rows, tools=self._shown_tools, add_generation_prompt=prompt
            )
        except _RENDERING_ERRORS as error:
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(f"the template refuses the roles [{roles}]: {error}") from error

    def after_reply(self, history: Sequence[ChatMessage], new: Sequence[ChatMessage], *, prompt: bool = True) -> str:
        """What stands behind the text of the last message of `history`, the policy's, once `new` is appended."""
        if not history or history[-1].role != "assistant":
            raise EnvError(
                f"{self.name}: new messages depend on the conversation so far, which must be given (`messages`) and end "
                "with the assistant's message that they follow."
            )
        mark = _REPLY
        while any(mark in message.content for message in (*history, *new)):
            mark += "Again"
        reply = history[-1]
        marked = [*history[:-1], ChatMessage("assistant", mark, reply.tool_calls, reply.tool_call_id), *new]
        _, found, tail = self.text(marked, prompt=prompt).partition(mark)
        if not found:
            raise TemplateError("the template leaves out what the assistant said")
        return tail

    def split_end(self, tail: str) -> tuple[str, str]:
        """The end-of-turn token that `tail` starts with, and the text behind that token.

        White space before it is dropped: whether to write it is the policy's choice.
        """
        text = tail.lstrip()
        length = next((length for length in self._added_lengths if text[:length] in self._added), None)
        if length is None:
            raise TemplateError(f"no end-of-turn token follows what the assistant said, but {tail[:40]!r}")
        return text[:length], text[length:]

    def final_end(self, *, system: bool) -> str:
        """The token that closes the assistant's turn at the end of a conversation: what a trained model samples."""
        return self.split_end(self.after_reply([*opening(system), _reply(0)], [], prompt=False))[0]

    def waiting_end(self) -> str | None:
        """The token by which Llama 3.1 and later end a turn that waits for a tool; None where the template has none."""
        return _WAITING_END if _WAITING_END in self._source and _WAITING_END in self._added else None

    def generation_prompt(self, *, system: bool) -> str:
        """What the template adds to ask for an assistant's turn, e.g. a header and "<think>"."""
        messages = opening(system)
        return self.text(messages).removeprefix(self.text(messages, prompt=False))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands: nothing is added in front or behind."""
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        if fast is None or fast.truncation or fast.padding:  # which the tokenizer's own call switches off
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        return fast.encode(text, add_special_tokens=False).ids

    def on_another_day(self) -> ChatTemplate:
        """The same template with the clock put forward."""
        return ChatTemplate(self.tokenizer, self.tools, self._args, day=ANOTHER_DAY)

    def without_tools(self) -> ChatTemplate:
        """The same template where no tools are given."""
        return ChatTemplate(self.tokenizer, None, self._args) if self.tools else self

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return chat_template_utils._compile_jinja_template(self._source)

    def _checked_source(self) -> str:
        if not self.tokenizer.chat_template:
            raise TemplateError(
                f"The tokenizer {self.name} has no chat template. Take the model's instruct version, or set "
                "tokenizer.chat_template to a Jinja template and save the tokenizer again."
            )
        if self.tokenizer.pad_token_id is None:
            raise ModelError(
                f"The tokenizer {self.name} has no pad token. Set one that it already has, for example model.pad_token="
                f"{self.tokenizer.eos_token or '<|endoftext|>'!r} or tokenizer.pad_token = tokenizer.eos_token."
            )
        try:
            return self.tokenizer.get_chat_template(tools=self.tools)
        except ValueError as error:
            raise TemplateError(f"The tokenizer {self.name} has no chat template to take by default: {error}") from error

    def _checked_args(self) -> dict[str, Any]:
        given = {"messages", *inspect.signature(self.tokenizer.apply_chat_template).parameters} - {"documents", "kwargs"}
        for name in self._args:
            if name in given:
                raise ConfigError(
                    f"template_args: {name!r} is not accepted: apply_chat_template takes it for itself. Accepted: variables "
                    "of the template, such as enable_thinking."
                )
        return self._args


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of tokens, the special ones included, and nothing tidied up."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return fast.decode(token_ids, skip_special_tokens=False)


def opening(system: bool) -> list[ChatMessage]:
    """A made-up first prompt."""
    asked = [ChatMessage("user", "ProbeOpeningQuestion")]
    return [ChatMessage("system", "ProbeSystemPrompt"), *asked] if system else asked


def opening_objection(template: ChatTemplate, *, system: bool) -> str | None:
    """Why no conversation can be opened with (or without) a system prompt; None when it can."""
    messages = opening(system)
    try:
        text = template.text(messages)
    except TemplateError as error:
        return str(error)
    lost = [message.role for message in messages if message.content not in text]
    if lost:
        return f"the template leaves out what the {lost[0]} message says"
    names = [str((tool.get("function") or tool).get("name")) for tool in template.tools or ()]
    lost = [name for name in names if name not in text]
    if lost:
        return f"the template does not show the tool {lost[0]!r}; set no tool schemas, describe tools in the system prompt"
    return None


def objection(
    template: ChatTemplate, shape: Shape, *, system: bool, base: Sequence[ChatMessage] | None = None
) -> str | None:
    """Why turns of this shape cannot be appended to a conversation token for token; None when they can.

    New messages are rendered behind the short conversation `base`, without one behind the probed conversation itself.
    """
    plans = [(shape, shape, shape)]
    if shape != ("user",) and objection(template, ("user",), system=system, base=base) is None:
        plans.append((shape, ("user",), shape))
    try:
        for plan in plans:
            for thinks in (False, True):
                _Probe(template, plan, opening(system), thinks, base).check()
    except TemplateError as error:
        return str(error)
    return None


def alike(one: ChatTemplate, other: ChatTemplate, shape: Shape, base: Sequence[ChatMessage]) -> bool:
    """Whether two templates render messages of this shape in the same way behind the conversation `base`."""
    new = _made_up(shape, 0)
    try:
        return one.after_reply(base, new) == other.after_reply(base, new)
    except TemplateError:
        return False


class _Probe:
    """One made-up conversation, rendered as a whole and turn by turn."""

    def __init__(
        self,
        template: ChatTemplate,
        plan: Sequence[Shape],
        asked: Sequence[ChatMessage],
        thinks: bool,
        base: Sequence[ChatMessage] | None,
    ):
        self._template = template
        self._opening = asked
        self._turns = [_made_up(shape, number) for number, shape in enumerate(plan)]
        self._replies = [_reply(number, thinks=thinks) for number in range(len(plan))]
        self._base = base

    def check(self) -> None:
        """Raise TemplateError with the reason when the two renderings disagree."""
        self._template.split_end(self._template.after_reply([*self._opening, self._replies[0]], [], prompt=False))
        whole = self._template.text(self._messages(len(self._turns)))
        pieces = _split(whole, [_name(number) for number in range(len(self._turns))])
        self._check_opening(pieces[0])
        for number, piece in enumerate(pieces[1:]):
            self._check_turn(number, piece)
        if pieces[-1] != self._template.after_reply(self._history(len(self._turns) - 1), self._turns[-1]):
            raise TemplateError("the last turn is rendered in another way than when it is appended")
        self._check_tokens(whole, pieces)

    def _messages(self, turns: int) -> list[ChatMessage]:
        messages = list(self._opening)
        for reply, turn in zip(self._replies[:turns], self._turns, strict=False):
            messages += [reply, *turn]
        return messages

    def _history(self, number: int) -> Sequence[ChatMessage]:
        return self._base or [*self._messages(number), self._replies[number]]

    def _check_opening(self, piece: str) -> None:
        asked, prompted = (self._template.text(self._opening, prompt=prompt) for prompt in (False, True))
        _check_same(piece, asked, prompted, "the first prompt")

    def _check_turn(self, number: int, piece: str) -> None:
        history, turn = self._history(number), self._turns[number]
        asked, prompted = (self._template.after_reply(history, turn, prompt=prompt) for prompt in (False, True))
        what = " + ".join(message.role for message in turn) + f" after answer {number + 1}"
        lost = [message.role for message in turn if asked.count(message.content) != 1]
        if lost:
            raise TemplateError(f"the template leaves out or repeats what a {lost[0]} message says")
        _check_same(piece, asked, prompted, what)
        if self._template.tells_time and self._template.on_another_day().after_reply(history, turn) != prompted:
            raise TemplateError("the template puts the current date or time into follow-up messages")

    def _check_tokens(self, whole: str, pieces: Sequence[str]) -> None:
        token_ids, start = self._template.encode(whole), len(pieces[0])
        for number, piece in enumerate(pieces[1:]):
            start += len(_name(number))
            end, _ = self._template.split_end(piece)
            cut = start + piece.index(end)
            if self._template.encode(whole[:cut]) + self._template.encode(whole[cut:]) != token_ids:
                raise TemplateError(f"the tokenizer merges the end-of-turn token {end!r} with the text around it")
            start += len(piece)


def _check_same(piece: str, asked: str, prompted: str, what: str) -> None:
    """`piece` is `asked` plus a header of the next answer, which may differ from the generation prompt in its end.

    Templates strip earlier thoughts, and generation prompts open them; what else they put there must agree.
    """
    if not prompted.startswith(asked):
        raise TemplateError(f"{what}: the generation prompt is not put at the end")
    if not piece.startswith(asked):
        raise TemplateError(f"{what}: rendered as {_differing(asked, piece)} when the conversation goes on")
    header, prompt = _without_thoughts(piece[len(asked) :]), _without_thoughts(prompted[len(asked) :])
    if not (header.startswith(prompt) or prompt.startswith(header)):
        raise TemplateError(f"{what}: the assistant's turn opens with {header!r}, but is asked for with {prompt!r}")


def _differing(expected: str, found: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), len(found))
    start = max(0, same - 10)
    return f"...{expected[start : same + 30]!r} when appended but ...{found[start : same + 30]!r}"


def _without_thoughts(text: str) -> str:
    return re.sub(r"\s*<think>.*?(</think>|$)", "", text, flags=re.DOTALL).rstrip()


def _split(whole: str, names: Sequence[str]) -> list[str]:
    pieces, rest = [], whole
    for name in names:
        if whole.count(name) != 1 or name not in rest:
            raise TemplateError("the template leaves out, repeats or moves what the assistant said")
        piece, _, rest = rest.partition(name)
        pieces.append(piece)
    return [*pieces, rest]


def _name(number: int) -> str:
    return f"{_REPLY}{number}End"


def _reply(number: int, *, thinks: bool = False) -> ChatMessage:
    thought = f"<think>\nProbeThought{number}End\n</think>\n\n" if thinks else ""
    return ChatMessage("assistant", thought + _name(number))


def _made_up(shape: Shape, turn: int) -> list[ChatMessage]:
    return [ChatMessage(role, f"Probe{turn}x{number}{role}End") for number, role in enumerate(shape)]


def _row(message: ChatMessage) -> dict[str, Any]:
    """A message as templates see it. Its texts need no copy, only calls can hold anything."""
    row = message.to_dict()
    texts_only = not message.tool_calls and type(message.role) is type(message.content) is str
    return row if texts_only else _plain(row)


def _pin_clock(source: str, day: datetime) -> str:
    """Shadow the template's clock by a macro that always tells the same time."""
    told = "".join(f".replace('%{letter}', '{day.strftime('%' + letter)}')" for letter in _DIRECTIVES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{told} }}}}{{% endmacro %}}\n{source}"


def _plain(value: Any) -> Any:
    """What a template is shown: templates come from strangers, and objects have methods. A name stands for what is no data.

    New versions of transformers show the same, and older ones things as they are.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(_plain(item) for item in value)
    bare = next((bare for kind, bare in _BARE.items() if isinstance(value, kind)), None)
    return bare(value) if bare else f"<{type(value).__name__}>"
