"""What a chat template writes for a turn of the assistant, behind the generation prompt, and the tokens that end it.

It can be more than the message says, such as a channel's name or an empty thought. A policy that was trained on the message
alone would be asked in one way and answer in another.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence

from rl4llm.core.errors import DataError, TemplateError
from rl4llm.core.types import ChatMessage
from rl4llm.data.messages import unusable
from rl4llm.data.probe import without_thoughts
from rl4llm.data.template import ChatTemplate

_CALLS_IN_TEXT = "write the calls into the message's content, as the policy should write them"
_OTHER_TEXT = "write the message as the template does, with its thought; set env.template_args; or use another chat template"


def written_turn(
    template: ChatTemplate, prompt: str, messages: Sequence[ChatMessage], opened: str = ""
) -> tuple[str, str]:
    """Return what the template writes for the last of `messages` behind `prompt`, and the token that ends this turn.

    A thought that the template drops stays as it is in the message. `opened` is the thought that the prompt opens. The token
    is "" if the template writes none. Raises DataError with both texts if the template asks for the turn in another way.
    """
    message, number = messages[-1], len(messages) - 1
    whole = template.text(messages, prompt=False).rstrip()
    turn, end = template.without_end(whole, called=bool(message.tool_calls))
    size = len(template.shared(prompt, turn))
    header, answer, reason = prompt[size:], turn[size:], None
    if end is None:
        reason = f"the turn does not end in {template.end.token!r} but in {whole[-40:]!r}"
    elif header and not _is_empty_thought(template, header, answer):
        near = max(0, size - 20)
        reason = (
            f"it asks with {prompt[near:]!r}, but renders the turn differently after the generation prompt: "
            f"{turn[near:][:80]!r}"
        )
    else:
        reason = _lost(message, template.special.plain(opened + answer))
    if not reason:
        return answer, end or ""
    raw = template.special.marked(message.content.removeprefix(opened), "assistant")
    if (
        message.tool_calls is None
        and not message.reasoning
        and message.content.startswith(opened)
        and _drops_thought(prompt, raw, turn, opened)
    ):
        return raw, end or ""
    if not message.tool_calls and not message.content.startswith(opened):
        reason = f"the generation prompt opens {opened!r}, but it begins with {message.content[:30]!r}"
    step = _CALLS_IN_TEXT if message.tool_calls else _OTHER_TEXT
    raise DataError(
        f"The chat template of {template.name} cannot be used for message {number}: {reason}. Next step: {step}."
    )


def _is_empty_thought(template: ChatTemplate, asked: str, said: str) -> bool:
    """Return whether a generation prompt ends with a closed block of tokens, which the template drops from turns."""
    block = template.tokens(asked)
    closed = len(block) > 1 and asked.startswith(block[0]) and asked.endswith(block[-1])
    return closed and template.tokens(said)[:1] not in ([token] for token in block)


def _drops_thought(prompt: str, raw: str, turn: str, opened: str) -> bool:
    """Return whether a turn is prompt and message except for thoughts, unless the prompt forbids thoughts."""
    if prompt.endswith("</think>") and not opened:
        return False
    texts = {"".join(without_thoughts(text).split()) for text in (prompt + raw, turn)}
    return "</think>" in prompt + raw and len(texts) == 1


def _lost(message: ChatMessage, said: str) -> str | None:
    """Return what a rendering loses of a message; None if it loses nothing."""
    content, rendering = ("".join(text.split()) for text in (message.content, said))  # without white space
    if content not in rendering:
        return f"it leaves out or alters {message.content[:40]!r}"
    if "".join(message.reasoning.split()) not in rendering:
        return f"it leaves out or alters the thought {message.reasoning[:40]!r}"
    functions = [call.get("function") or call for call in message.tool_calls or ()]
    for name, count in Counter(str(function.get("name")) for function in functions).items():
        if said.count(name) < count:
            return f"it leaves out a call of {name!r}"
    for function in functions:
        arguments = function.get("arguments")
        if isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False) in said:
            return f"it quotes the arguments {arguments[:40]!r}, which are a string; make them an object"
    return None


def stop_token_ids(
    template: ChatTemplate, roles: Sequence[str], before_tools: Callable[[], list[str]]
) -> tuple[int, ...]:
    """Return the tokens that end the policy's turn, that of the template first; `before_tools` are those before tools.

    Raises TemplateError if there is none.
    """
    tokenizer = template.tokenizer
    stops = [] if tokenizer.eos_token is None else [tokenizer.eos_token]
    try:
        end = template.end
    except TemplateError as error:
        if not stops:
            what = "any conversation, and the tokenizer has no eos token either"
            raise unusable(template.name, what, str(error)) from error
    else:
        stops = [end.token, *stops]
        if end.next_role or "tool" in roles:
            stops += before_tools()
    stops += filter(None, [template.waiting_end()])
    return tuple(dict.fromkeys(tokenizer.convert_tokens_to_ids(stops)))


def sampled_end(template: ChatTemplate, token_ids: Sequence[int], by: int | None, stop: int) -> int:
    """Return how many of the tokens behind an answer the policy sampled, given the token that ended its turn."""
    end = template.end
    if end.next_role:
        return int(by is None or token_ids[0] == by)
    late = not end.closing.startswith(end.token) and end.closing
    return list(token_ids).index(stop) + 1 if late and stop in token_ids else 1
