"""Thoughts that a chat template drops from earlier turns: kept, dropped as the template does, or refused.

Many templates of reasoning models leave out what the policy thought before the last question. A policy that trains with
these thoughts in its prompts reads other prompts than a server gives it later. With `env.thoughts=drop` a new token record
begins where the template drops thoughts, see `rl4llm.envs.policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl4llm.core.errors import ConfigError, TemplateError
from rl4llm.core.types import ChatMessage, TokenSpan
from rl4llm.data.template import ChatTemplate, opening

if TYPE_CHECKING:
    from rl4llm.data.render import Renderer

THOUGHTS = ("keep", "drop", "refuse")
_THOUGHT = "ProbeThoughtOfTheFirstTurn"


def drops_thoughts(template: ChatTemplate, role: str) -> bool:
    """Return whether the template drops the thought of a turn once a message of this role follows it."""
    if template.calls:  # it renders none of what the policy wrote there
        return False
    turn = [
        ChatMessage("assistant", f"<think>\n{_THOUGHT}\n</think>\n\nProbeAnswer"),
        ChatMessage(role, "ProbeReply"),
    ]
    for system in (False, True):
        try:
            return _THOUGHT not in template.text([*opening(system), *turn])
        except TemplateError:
            continue
    return False


def check_thoughts(template: ChatTemplate, thoughts: str, *, drops: bool) -> None:
    """Raise an error if `env.thoughts` is unknown or refuses the template; note that thoughts are kept."""
    if thoughts not in THOUGHTS:
        raise ConfigError(f"env.thoughts={thoughts!r} is not accepted. Accepted: {', '.join(THOUGHTS)}.")
    if drops and thoughts == "refuse":
        raise TemplateError(
            f"The chat template of {template.name} drops thoughts of earlier turns. Set env.thoughts=drop or keep."
        )
    if drops and thoughts == "keep":
        template.notes.add(
            "the template drops thoughts of earlier turns, but episodes keep them (env.thoughts=keep), so later prompts "
            "differ from those of a server; env/kept_thoughts counts the tokens, and env.thoughts=drop avoids it"
        )


def forked(renderer: Renderer, token_ids: Sequence[int], messages: Sequence[ChatMessage]) -> TokenSpan | None:
    """Return the template's prompt for `messages` if thoughts are dropped and `token_ids` read differently, else None."""
    answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
    new = {message.role for message in messages[answers[-1] + 1 :]} if answers else set()
    if renderer.thoughts != "drop" or not new & renderer.dropping:
        return None
    prompt = renderer.context(renderer.prompt(messages), messages)
    return None if renderer.decode(prompt.token_ids) == renderer.decode(token_ids) else prompt


def kept_thoughts(renderer: Renderer, spans: Sequence[TokenSpan], messages: Sequence[ChatMessage]) -> int:
    """Return by how many tokens the last prompt exceeds the template's rendering, which drops earlier thoughts."""
    answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
    between = {message.role for message in messages[answers[0] : answers[-1]]} if answers else set()
    if renderer.thoughts != "keep" or not between & renderer.dropping:
        return 0
    authors = [span.author for span in spans]
    end = len(authors) - authors[::-1].index("policy") if "policy" in authors else 0
    while end and authors[end - 1] == "policy":  # several versions of the weights may have written the turn
        end -= 1
    length = sum(len(span.token_ids) for span in spans[:end])
    prompt = messages[: answers[-1]]
    return max(0, length - len(renderer.context(renderer.prompt(prompt), prompt).token_ids))
