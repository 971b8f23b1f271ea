"""Probe a chat template: can a conversation be extended token for token?

Each answer of the policy stays as it was sampled, so a template only renders what comes *after* an answer. That is sound if
the text after an answer does not depend on the answer, and stays the same when the conversation continues. `objection`
checks this by rendering made-up conversations both ways.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from rl4llm.core.errors import TemplateError
from rl4llm.core.types import ChatMessage
from rl4llm.data.messages import marked
from rl4llm.data.template import MADE_UP_CALL, ChatTemplate, Shape, opening, probe_name, probe_reply


def opening_objection(template: ChatTemplate, *, system: bool) -> str | None:
    """Return why no conversation can start with (or without) a system prompt; None if it can."""
    messages = opening(system)
    try:
        text = template.text(messages)
    except TemplateError as error:
        return str(error)
    plain = template.special.plain(text)
    parts = {f"what the {message.role} message says": message.content in text for message in messages}
    parts |= {"the description of tools": template.described in text}
    parts |= {f"the tool {name!r}": name in plain for name in template.shown_names}
    return next((f"the template leaves out {part}" for part, shows in parts.items() if not shows), None)


def whole_prompt(template: ChatTemplate, messages: Sequence[ChatMessage]) -> str:
    """Return the rendering of a prompt; raise TemplateError if the template leaves out a message of it, or a call."""
    text = template.text(messages)
    form = tuple((item.role, bool(item.content.strip()), len(item.tool_calls or ())) for item in messages)
    if form not in template.losses:
        template.losses[form] = _loss(template, messages)
    if reason := template.losses[form]:
        raise TemplateError(reason)
    return text


def _loss(template: ChatTemplate, messages: Sequence[ChatMessage]) -> str | None:
    """Return what the template leaves out of messages like these, with made-up texts and arguments; None if nothing."""
    marks, trial = {}, list(messages)
    for number, message in enumerate(messages):
        name, called = probe_name(number), f"{probe_name(number)}Call"
        # some templates leave out what is said beside a call, as OpenAI's, in which it is a thought
        if message.content.strip() and not message.parts and not message.tool_calls:
            trial[number] = replace(message, content=name)
            marks[name] = f"what message {number + 1}, the {message.role}'s, says"
        if message.role == "assistant" and message.tool_calls:
            trial[number] = marked(trial[number], called)
            marks[called] = f"a call of a tool in message {number + 1}"
    try:
        text = template.text(trial)
    except TemplateError:
        return None
    lost = next((what for mark, what in marks.items() if mark not in text), None)
    return lost and f"the template leaves out {lost}"


def showing(template: ChatTemplate, call_example: str) -> ChatTemplate:
    """Return a template that shows its tools: itself, or if it hides them, one that describes them with an example."""
    if not (template.tools and call_example):
        return template
    if not all(opening_objection(template, system=system) for system in (False, True)):
        return template  # it shows them
    try:
        describing = template.describing(call_example)
    except TemplateError:  # one of several templates, which asks for tools
        return template
    if all(opening_objection(describing, system=system) for system in (False, True)):
        return template
    template.notes.add(DESCRIBED)
    return describing


def objection(
    template: ChatTemplate, shape: Shape, *, system: bool, base: Sequence[ChatMessage] | None = None
) -> str | None:
    """Return why turns of this shape cannot be appended to a conversation token for token; None if they can.

    New messages are rendered after the short conversation `base`, or by default after the probed conversation.
    """
    plans = [(shape, shape, shape)]
    if shape != ("user",) and objection(template, ("user",), system=system, base=base) is None:
        plans.append((shape, ("user",), shape))
    try:
        for plan in plans:
            for thinks in (False, True):
                _Trial(template, plan, opening(system), thinks, base).check()
    except TemplateError as error:
        return str(error)
    return None


def alike(one: ChatTemplate, other: ChatTemplate, shape: Shape, base: Sequence[ChatMessage]) -> bool:
    """Return whether two templates render messages of this shape in the same way after the conversation `base`."""
    new = _made_up(shape, 0)
    try:
        return one.after_reply(base, new).lstrip() == other.after_reply(base, new).lstrip()
    except TemplateError:
        return False


RESPACED = (
    "the template changes white space in earlier messages when the conversation continues; the policy reads them as first "
    "rendered"
)


DESCRIBED = "the template does not show the schemas of tools, so the system prompt describes them"


class _Trial:
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
        self._replies = [probe_reply(number, thinks=thinks) for number in range(len(plan))]
        self._base = base

    def check(self) -> None:
        """Raise TemplateError with the reason if the two renderings differ."""
        self._template.end  # noqa: B018 - raises if no token ends a turn
        whole, pieces, stops = self._pieces()
        head = whole[: whole.index(probe_name(0))]
        plain, prompted = (self._template.text(self._opening, prompt=prompt) for prompt in (False, True))
        self._check_same(head, plain, prompted, "the first prompt")
        for number, piece in enumerate(pieces):
            self._check_turn(number, piece)
        if pieces[-1] != self._template.after_reply(self._history(len(self._turns) - 1), self._turns[-1]):
            raise TemplateError("the last turn is rendered differently when it is appended")
        self._check_tokens(whole, pieces, stops)

    def _pieces(self) -> tuple[str, list[str], list[int]]:
        """Return the whole conversation, what follows each turn of the policy in it, and where each of these ends."""
        sizes = [0, *itertools.accumulate(1 + len(turn) for turn in self._turns[:-1])]
        places = [len(self._opening) + size for size in sizes]
        names = list(map(probe_name, range(len(places))))
        messages = self._template.linked(self._messages(len(self._turns)))
        called = [bool(messages[place].tool_calls) for place in places]
        for place, name, calls in zip(places, names, called, strict=True):
            messages[place] = marked(messages[place], name) if calls else messages[place]
        whole = self._template.text(messages)
        starts = [whole.find(name) for name in names]
        if any(whole.count(name) != 1 for name in names) or starts != sorted(starts):
            raise TemplateError("the template leaves out, repeats or moves what the assistant said")
        stops = [*starts[1:], len(whole)]
        pieces = [
            whole[start + len(name) : stop] for start, name, stop in zip(starts, names, stops, strict=True)
        ]
        for number, place in enumerate(places):
            if called[number]:
                turn = messages[: place + 1]
                pieces[number] = self._template.after_calls(turn, pieces[number], names[number])
        return whole, pieces, stops

    def _messages(self, turns: int) -> list[ChatMessage]:
        messages = list(self._opening)
        for reply, turn in zip(self._replies[:turns], self._turns, strict=False):
            messages += [reply, *turn]
        return messages

    def _history(self, number: int) -> Sequence[ChatMessage]:
        return self._base or [*self._messages(number), self._replies[number]]

    def _check_turn(self, number: int, piece: str) -> None:
        history, turn = self._history(number), self._turns[number]
        plain, prompted = (
            self._template.after_reply(history, turn, prompt=prompt) for prompt in (False, True)
        )
        what = " + ".join(message.role for message in turn) + f" after answer {number + 1}"
        lost = [message.role for message in turn if plain.count(message.content) != 1]
        if lost:
            raise TemplateError(f"the template leaves out or repeats what a {lost[0]} message says")
        self._check_same(piece, plain, prompted, what)
        later = self._template.on_another_day() if self._template.tells_time else self._template
        if later.after_reply(history, turn) != prompted:
            raise TemplateError("the template puts the current date or time into follow-up messages")

    def _check_tokens(self, whole: str, pieces: Sequence[str], stops: Sequence[int]) -> None:
        token_ids = self._template.encode(whole)
        for piece, stop in zip(pieces, stops, strict=True):
            end, _ = self._template.split_end(piece)
            cut = stop - len(piece) + piece.index(end)
            if self._template.encode(whole[:cut]) + self._template.encode(whole[cut:]) != token_ids:
                raise TemplateError(f"the tokenizer merges the end-of-turn token {end!r} with other text")

    def _check_same(self, piece: str, asked: str, prompted: str, what: str) -> None:
        """Check that `piece` is `asked` plus a header of the next answer that agrees with the generation prompt.

        Their ends may differ: templates strip earlier thoughts, and generation prompts open them.
        """
        begun, fixed = self._template.shared(asked, prompted), asked == prompted
        if not self._only_tokens(asked[len(begun) :]):  # some templates end a conversation with a token
            raise TemplateError(f"{what}: the generation prompt is not at the end")
        if fixed:  # the template asks for an answer in any case
            begun = self._template.shared(piece, prompted)
        size = _reaches(piece, begun)
        if size and not piece.startswith(begun):
            self._template.notes.add(RESPACED)
        if size is None:
            same = next((i for i, (a, b) in enumerate(zip(begun, piece, strict=False)) if a != b), len(piece))
            appended, continued = (text[max(0, same - 10) : same + 30] for text in (begun, piece))
            raise TemplateError(
                f"{what}: rendered as ...{appended!r} when appended but ...{continued!r} when the conversation continues"
            )
        heads = piece[size:], prompted[len(begun) :]
        header, prompt = map(without_thoughts, heads)
        shared = self._template.shared(*heads)
        begin = all(self._template.begins_with_token(head[len(shared) :]) for head in heads)
        # it may open a channel other than that of made-up answers
        if not (
            header.startswith(prompt) or prompt.startswith(header) or (begin and (fixed or shared.strip()))
        ):
            raise TemplateError(f"{what}: the turn opens with {header!r}, but is asked for with {prompt!r}")

    def _only_tokens(self, text: str) -> bool:
        """Return whether a text has nothing but added tokens and white space."""
        for token in self._template.tokens(text):
            text = text.replace(token, "", 1)
        return not text.strip()


def _reaches(piece: str, begun: str) -> int | None:
    """Return where the beginning of `piece` ends that equals `begun` except for white space; None if it differs."""
    if piece.startswith(begun):
        return len(begun)
    text = begun.rstrip()
    pattern = r"\s*".join(map(re.escape, "".join(text.split()))) + re.escape(begun.removeprefix(text))
    match = re.match(pattern, piece)
    return match.end() if match and text else None


def without_thoughts(text: str) -> str:
    """Return a text without thoughts, also one that is not closed."""
    return re.sub(r"\s*<think>.*?(</think>|$)", "", text, flags=re.DOTALL).rstrip()


def _made_up(shape: Shape, turn: int) -> list[ChatMessage]:
    messages = []
    for number, role in enumerate(shape):
        call = {**MADE_UP_CALL, "id": f"call{turn:02}{number:03}"}
        messages.append(
            ChatMessage(role, f"Probe{turn}x{number}{role}End", (call,) if role == "tool" else None)
        )
    return messages
