"""One episode as its agent talks to the policy: requests become prompts of exact tokens, completions become answers."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import xxhash

from rl4llm.core.base_env import LLM, SampleState
from rl4llm.core.errors import ConfigError, DataError, TemplateError
from rl4llm.core.message import after_thinking
from rl4llm.core.types import ChatMessage, Completion, SamplingParams
from rl4llm.data.render import Renderer
from rl4llm.envs.tools.formats import CallFormat, ToolCall, call_format
from rl4llm.extensions.agents.history import Continuation, Entry, History
from rl4llm.extensions.agents.wire import Answer, Asked, RequestError, dumps, read_message, write_call
from rl4llm.runtime.seeds import derive_seed

KEPT = 64  # sets of tools whose renderers are kept


@dataclass(frozen=True, slots=True)
class Dialect:
    """How conversations with one set of tools are rendered and their calls are parsed; `tools` identifies the set."""

    tools: str
    renderer: Renderer
    calls: CallFormat | None


class Dialects:
    """The dialects of a tokenizer; each is built when its set of tools is first used.

    `special_tokens` says what special tokens in the agent's messages become, see `rl4llm.data.special`. `template_args` are
    variables of the chat template.
    """

    def __init__(
        self, tokenizer: Any, special_tokens: str = "escape", template_args: Mapping[str, Any] | None = None
    ):
        self.tokenizer, self._how = tokenizer, (template_args, special_tokens)
        self.longest_token = max(map(len, tokenizer.get_vocab()))  # maximum number of characters per token
        self._made: OrderedDict[str, Dialect] = OrderedDict()

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
            renderer = Renderer(self.tokenizer, tools, (), *self._how, calls.example if calls else "")
            self._made[name] = Dialect(name, renderer, calls)
        self._made.move_to_end(name)
        while len(self._made) > KEPT:
            self._made.popitem(last=False)
        return self._made[name]


class AgentSession:
    """Answers the requests of one episode, and keeps its token records.

    `key` is the secret in its requests. `over` is done when the episode has to end whatever the agent does: with None
    if the sample failed, else with the error that stops the run. `ran_into` is the limit that refused the last request,
    as a stop reason.
    """

    def __init__(
        self, sample: SampleState, llm: LLM, params: SamplingParams, dialects: Dialects, *, max_requests: int
    ):
        self.key = secrets.token_urlsafe(18)
        self.sample = sample
        self.params = params.replace(**sample.special.sampling)
        self.history = History()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests = self.sampled_tokens = 0
        self.ran_into: str | None = None
        self.overridden: set[str] = set()
        self._llm, self._dialects, self._max_requests = llm, dialects, max_requests
        self._draws: Counter[str] = Counter()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._truncated = False

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Register the running task, so that it is cancelled if the episode ends first."""
        task = asyncio.current_task()
        assert task is not None  # this runs in a coroutine
        self._under_way.add(task)
        try:
            yield
        finally:
            self._under_way.discard(task)

    async def close(self) -> None:
        """Refuse new requests, and cancel those in progress."""
        self._closed = True
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(set(self._under_way), timeout=5.0)
        if not self.over.done():
            self.over.cancel()
        elif not self.over.cancelled():
            self.over.exception()  # marks the exception as retrieved

    def broke(self, error: BaseException) -> None:
        """Record an error that is neither the agent's fault nor confined to this sample."""
        if not self.over.done():
            self.over.set_exception(error)

    @property
    def stop_reason(self) -> str:
        """Why an episode ended whose agent finished."""
        return self.ran_into or ("length" if self._truncated else "done")

    @property
    def conversation(self) -> tuple[list[ChatMessage], int]:
        """The messages up to the policy's last answer, and the index of the policy's first answer in them."""
        messages = list(self.history.entries[-1].messages)
        said = [record.messages[count - 1] for record in self.history.records for count, _ in record.answers]
        return messages, next((i for i, message in enumerate(messages) if message in said), len(messages))

    async def answer(self, asked: Asked) -> tuple[Answer, Entry]:
        """Return the policy's answer and its entry in a record. Raises RequestError for a request that is refused."""
        self.check_open()
        self.overridden.update(asked.overridden)
        dialect, place = self._placed(asked)
        params = self._limited(asked, len(place.prompt_ids))
        self.requests += 1
        digest = xxhash.xxh3_64_hexdigest(str(place.prompt_ids).encode())
        draw = self._draws[digest]  # a repeated question is a new draw, whichever request comes first
        self._draws[digest] += 1
        completion = await self._llm.complete(self.sample, place.prompt_ids, params, digest, draw)
        self.sampled_tokens += len(completion.token_ids)
        self.check_open()
        answer = self._written(asked, dialect, place, completion, params, f"{digest}-{draw}")
        self.sample.current_step += 1
        self._truncated = completion.finish_reason == "length"
        if self.ran_into == "context":  # the agent shortened its prompt
            self.ran_into = None
        return answer, self.history.add(place, completion, read_message(answer.message))

    def check_open(self) -> None:
        """Raise RequestError when the episode is over."""
        if self.sample.failure is not None and not self.over.done():
            self.over.set_result(None)
        if self._closed or self.sample.done:
            why = f": {self.sample.failure}" if self.sample.failure else ""
            raise RequestError(
                f"This episode is over and accepts no more requests{why}.", status=410, code="episode_over"
            )

    def check_size(self, count: int) -> None:
        """Refuse more messages or tools than tokens fit the context, before anything is built of them."""
        if count > self._llm.context_length:
            self._refuse(
                "context",
                f"The request has {count} messages or tools, but the context length is {self._llm.context_length} tokens.",
            )

    def _placed(self, asked: Asked) -> tuple[Dialect, Continuation]:
        if self.requests >= self._max_requests:
            self._refuse(
                "max_steps", f"All {self._max_requests} requests of this episode are used up (env.max_steps)."
            )
        most = self._dialects.longest_token * self._llm.context_length
        if asked.characters > most:
            self._refuse(
                "context", "The messages are longer than any conversation that fits the policy's context."
            )
        try:
            dialect = self._dialects.of(asked.tools)
            return dialect, self.history.place(dialect.tools, asked.messages, dialect.renderer)
        except (TemplateError, DataError, ConfigError) as error:
            raise RequestError(str(error), code="invalid_messages", param="messages") from error

    def _limited(self, asked: Asked, prompt_tokens: int) -> SamplingParams:
        """Return the run's parameters with the request's stop strings, and a token limit that the request and the
        context allow.
        """
        room = self._llm.context_length - prompt_tokens
        if room < 1:
            self._refuse(
                "context",
                f"The prompt has {prompt_tokens} tokens, but the context length is {self._llm.context_length}.",
            )
        stop = tuple(dict.fromkeys((*self.params.stop, *asked.stop)))
        return self.params.replace(
            max_tokens=min(self.params.max_tokens, asked.max_tokens or room, room), stop=stop
        )

    def _refuse(self, limit: str, message: str) -> None:
        self.ran_into = limit
        code = {"context": "context_length_exceeded"}.get(limit, limit)
        raise RequestError(message, code=code, param="messages")

    def _written(
        self,
        asked: Asked,
        dialect: Dialect,
        place: Continuation,
        completion: Completion,
        params: SamplingParams,
        name: str,
    ) -> Answer:
        said = _cut(self._decoded(completion.token_ids), params.stop)
        calls = self._calls(said, dialect.calls) if asked.may_call else []
        ids = (
            f"{derive_seed('call', self.sample.session, name, i):09x}"[:9] for i in range(len(calls))
        )  # 9 characters, as Mistral requires
        text = dialect.calls.beside(said) if dialect.calls and calls else completion.text
        return Answer(
            id=f"chatcmpl-{name}",
            model=asked.model,
            content=dialect.renderer.content(text),
            calls=tuple(write_call(call, call_id) for call, call_id in zip(calls, ids, strict=True)),
            completion=completion,
            prompt_tokens=len(place.prompt_ids),
            token_texts=tuple(self._decoded([token]) for token in completion.token_ids)
            if asked.logprobs
            else None,
        )

    @staticmethod
    def _calls(said: str, written: CallFormat | None) -> list[ToolCall]:
        """Parse the tool calls; return [] if one is invalid, so that the agent receives the whole text."""
        calls = list(written.parse(after_thinking(said))) if written else []
        return [] if any(call.problem for call in calls) else calls

    def _decoded(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._dialects.tokenizer
        return tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _cut(text: str, stops: Sequence[str]) -> str:
    places = [place for place in map(text.find, stops) if place >= 0]
    return text[: min(places)] if places else text
