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
from rl4llm.core.seeds import derive_seed
from rl4llm.core.types import ChatMessage, Completion, SamplingParams
from rl4llm.data.render import Renderer
from rl4llm.envs.agent.history import Entry, History, Place
from rl4llm.envs.agent.wire import Answer, Asked, RequestError, dumps, read_message, write_call
from rl4llm.envs.tools.formats import CallFormat, ToolCall, call_format

THOUGHT_ENDS = "</think>"
KEPT = 64  # sets of tools whose renderers are kept


@dataclass(frozen=True, slots=True)
class Dialect:
    """How conversations with one set of tools are rendered, and how calls of them are read; `tools` names the set."""

    tools: str
    renderer: Renderer
    calls: CallFormat | None


class Dialects:
    """The dialects of a tokenizer, made when a set of tools first comes."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.longest_token = max(map(len, tokenizer.get_vocab()))  # characters that a token stands for, at most
        self._made: OrderedDict[str, Dialect] = OrderedDict()

    def of(self, tools: Sequence[Mapping[str, Any]]) -> Dialect:
        """Raises TemplateError or ConfigError where the chat template has no way to show the tools."""
        name = dumps(list(tools))
        if name not in self._made:
            renderer = Renderer(self.tokenizer, tools, roles=())  # who follows is probed when he first comes
            calls = call_format("auto", self.tokenizer, list(tools)) if tools else None
            self._made[name] = Dialect(name, renderer, calls)
        self._made.move_to_end(name)
        while len(self._made) > KEPT:
            self._made.popitem(last=False)
        return self._made[name]


class Session:
    """Answers the requests of one episode, and keeps its token records.

    `key` is the secret that its requests are known by. `over` is done when the episode has to end whatever the agent does:
    with None where the sample failed, else with the error that stops the run. `ran_into` is the limit that the last request
    was refused for, a stop reason.
    """

    def __init__(
        self, sample: SampleState, llm: LLM, params: SamplingParams, dialects: Dialects, *, max_requests: int
    ):
        self.key = secrets.token_urlsafe(18)
        self.sample = sample
        self.params = params.replace(**sample.sampling)
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
        """The running task answers a request; it is cancelled when the episode ends before that."""
        task = asyncio.current_task()
        assert task is not None  # it is a coroutine that gets here
        self._under_way.add(task)
        try:
            yield
        finally:
            self._under_way.discard(task)

    async def close(self) -> None:
        """Refuse what comes from now on, and give up what is under way."""
        self._closed = True
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(set(self._under_way), timeout=5.0)
        if not self.over.done():
            self.over.cancel()
        elif not self.over.cancelled():
            self.over.exception()  # looked at, if nobody did

    def broke(self, error: BaseException) -> None:
        """Something that is neither the agent's fault nor the sample's alone."""
        if not self.over.done():
            self.over.set_exception(error)

    @property
    def stop_reason(self) -> str:
        """Why an episode ended whose agent came to its end."""
        return self.ran_into or ("length" if self._truncated else "done")

    @property
    def conversation(self) -> tuple[list[ChatMessage], int]:
        """The messages up to the policy's last answer, of which there is one, and where in them its first is."""
        messages = list(self.history.entries[-1].messages)
        said = [record.messages[count - 1] for record in self.history.records for count, _ in record.answers]
        return messages, next((i for i, message in enumerate(messages) if message in said), len(messages))

    async def answer(self, asked: Asked) -> tuple[Answer, Entry]:
        """The policy's answer, in the record already. Raises RequestError for what is refused."""
        self.check_open()
        self.overridden.update(asked.overridden)
        dialect, place = self._placed(asked)
        params = self._limited(asked, len(place.prompt_ids))
        self.requests += 1
        digest = xxhash.xxh3_64_hexdigest(str(place.prompt_ids).encode())
        draw = self._draws[digest]  # the same question again is another draw, whoever asks first
        self._draws[digest] += 1
        completion = await self._llm.complete(self.sample, place.prompt_ids, params, digest, draw)
        self.sampled_tokens += len(completion.token_ids)
        self.check_open()
        answer = self._written(asked, dialect, place, completion, params, f"{digest}-{draw}")
        self.sample.current_step += 1
        self._truncated = completion.finish_reason == "length"
        if self.ran_into == "context":  # the agent has made room
            self.ran_into = None
        return answer, self.history.add(place, completion, read_message(answer.message))

    def check_open(self) -> None:
        """Raise RequestError when the episode is over."""
        if self.sample.failure is not None and not self.over.done():
            self.over.set_result(None)
        if self._closed or self.sample.done:
            why = f": {self.sample.failure}" if self.sample.failure else ""
            raise RequestError(f"This episode is over, and answers no more requests{why}.", status=410, code="episode_over")

    def _placed(self, asked: Asked) -> tuple[Dialect, Place]:
        if self.requests >= self._max_requests:
            self._refuse("max_steps", f"All {self._max_requests} requests of this episode are used up (env.max_steps).")
        most = self._dialects.longest_token * self._llm.context_length
        if asked.characters > most:
            self._refuse("context", "The messages are longer than any conversation that the policy's context holds.")
        try:
            dialect = self._dialects.of(asked.tools)
            return dialect, self.history.place(dialect.tools, asked.messages, dialect.renderer)
        except (TemplateError, DataError, ConfigError) as error:
            raise RequestError(str(error), code="invalid_messages", param="messages") from error

    def _limited(self, asked: Asked, prompt_tokens: int) -> SamplingParams:
        """The run's parameters with the request's stops, and no more tokens than were asked for and have room."""
        room = self._llm.context_length - prompt_tokens
        if room < 1:
            self._refuse("context", f"The prompt has {prompt_tokens} tokens; the context holds {self._llm.context_length}.")
        stop = tuple(dict.fromkeys((*self.params.stop, *asked.stop)))
        return self.params.replace(max_tokens=min(self.params.max_tokens, asked.max_tokens or room, room), stop=stop)

    def _refuse(self, limit: str, message: str) -> None:
        self.ran_into = limit
        code = {"context": "context_length_exceeded"}.get(limit, limit)
        raise RequestError(message, code=code, param="messages")

    def _written(
        self, asked: Asked, dialect: Dialect, place: Place, completion: Completion, params: SamplingParams, name: str
    ) -> Answer:
        said = _cut(self._decoded(completion.token_ids), params.stop)
        calls = self._calls(said, dialect.calls) if asked.may_call else []
        ids = (f"{derive_seed('call', self.sample.session, name, i):09x}"[:9] for i in range(len(calls)))  # Mistral's length
        text = dialect.calls.beside(said) if dialect.calls and calls else completion.text
        return Answer(
            id=f"chatcmpl-{name}",
            model=asked.model,
            content=dialect.renderer.content(text),
            calls=tuple(write_call(call, call_id) for call, call_id in zip(calls, ids, strict=True)),
            completion=completion,
            prompt_tokens=len(place.prompt_ids),
            token_texts=tuple(self._decoded([token]) for token in completion.token_ids) if asked.logprobs else None,
        )

    @staticmethod
    def _calls(said: str, written: CallFormat | None) -> list[ToolCall]:
        """None where one cannot be read: then the agent gets all of the text, and may answer that."""
        calls = list(written.parse(said.rpartition(THOUGHT_ENDS)[2])) if written else []
        return [] if any(call.problem for call in calls) else calls

    def _decoded(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._dialects.tokenizer
        return tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _cut(text: str, stops: Sequence[str]) -> str:
    places = [place for place in map(text.find, stops) if place >= 0]
    return text[: min(places)] if places else text
