"""How conversations with a set of tools become prompts, and completions become answers."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl4llm.core.message import after_thinking
from rl4llm.core.types import Completion, SamplingParams
from rl4llm.data.render import Renderer
from rl4llm.data.template import decode
from rl4llm.envs.chat_completions import write_call
from rl4llm.envs.tools.formats import CallFormat, ToolCall, call_format
from rl4llm.envs.wire import Answer, Asked, dumps

if TYPE_CHECKING:
    from rl4llm.data.vision import Vision

KEPT = 64  # sets of tools whose renderers are kept


@dataclass(frozen=True, slots=True)
class Dialect:
    """How conversations with one set of tools are rendered and their calls are parsed; `tools` identifies the set."""

    tools: str
    renderer: Renderer
    calls: CallFormat | None
    tokenizer: Any

    def answer(
        self,
        asked: Asked,
        completion: Completion,
        prompt_tokens: int,
        stops: Sequence[str],
        name: str,
        call_ids: Iterator[int],
    ) -> Answer:
        """Return the answer to a request, with the name in its id; `call_ids` has a number for each tool call."""
        turn, stop = _cut(decode(self.tokenizer, completion.token_ids), stops)
        calls = self._calls(turn)[: 1 if asked.one_call else None] if asked.may_call else []
        text = self.calls.beside(turn) if self.calls and calls else completion.text
        return Answer(
            id=name,
            model=asked.model,
            content=self.renderer.content(text),
            calls=tuple(
                write_call(call, f"{number:09x}"[:9])  # 9 characters, as Mistral requires
                for call, number in zip(calls, call_ids, strict=False)
            ),
            completion=completion,
            prompt_tokens=prompt_tokens,
            token_texts=tuple(decode(self.tokenizer, [token]) for token in completion.token_ids)
            if asked.logprobs
            else None,
            stopped_at=stop if stop in asked.stop else None,
        )

    def params(self, asked: Asked, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters that end an answer after its first call, if a request asks for it."""
        ends = asked.one_call and asked.may_call and self.calls is not None
        return self.calls.ending(params, self.tokenizer, 1) if ends and self.calls else params

    def _calls(self, said: str) -> list[ToolCall]:
        """Parse the tool calls; return [] if one is invalid, so that the agent receives the whole text."""
        calls = list(self.calls.parse(after_thinking(said))) if self.calls else []
        return [] if any(call.problem or not _in_json(call) for call in calls) else calls


class Dialects:
    """The dialects of a tokenizer; each is built when its set of tools is first used.

    `special_tokens` says what special tokens in the agent's messages become, see `rl4llm.data.special`. `template_args` are
    variables of the chat template. `vision` is what the model makes of images; None refuses them.
    """

    def __init__(
        self,
        tokenizer: Any,
        special_tokens: str = "escape",
        template_args: Mapping[str, Any] | None = None,
        vision: Vision | None = None,
    ):
        self.vision = vision
        self.tokenizer, self._how = tokenizer, (template_args, special_tokens)
        self.longest_token = max(map(len, tokenizer.get_vocab()))  # maximum number of characters per token
        self._made: OrderedDict[str, Dialect] = OrderedDict()

    def least_tokens(self, content: bytes) -> int:
        """Return how many tokens the JSON of a request has at least, without parsing it."""
        parts = max(content.count(key) for key in (b'"role"', b'"type"'))
        return max(parts, content.count(b",") // self.longest_token)

    def of(self, tools: Sequence[Mapping[str, Any]]) -> Dialect:
        """Return the dialect of a set of tools. Raises TemplateError or ConfigError if the chat template cannot show
        them.
        """
        name = dumps(list(tools))
        if name not in self._made:
            # A role is probed when it first occurs.
            calls = (
                call_format("auto", self.tokenizer, list(tools), template_args=self._how[0])
                if tools
                else None
            )
            example = calls.example if calls else ""
            renderer = Renderer(self.tokenizer, tools, (), *self._how, example, vision=self.vision)
            self._made[name] = Dialect(name, renderer, calls, self.tokenizer)
        self._made.move_to_end(name)
        while len(self._made) > KEPT:
            self._made.popitem(last=False)
        return self._made[name]


def _in_json(call: ToolCall) -> bool:
    """Return whether JSON can write a call: it has neither lone surrogates nor NaN."""
    try:
        return bool(json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode())
    except ValueError:
        return False


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text up to the first stop string, and that string."""
    place, stop = min(((text.find(stop), stop) for stop in stops if stop in text), default=(len(text), None))
    return text[:place], stop
