"""One episode as its agent talks to the policy: requests become prompts of exact tokens, completions become answers."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from rl4llm.core.base_env import LLM, SampleState
from rl4llm.core.errors import ConfigError, DataError, TemplateError
from rl4llm.core.images import Image, Picture
from rl4llm.core.message import UNSEEN
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.envs.chat_completions import read_message
from rl4llm.envs.dialects import Dialect, Dialects
from rl4llm.envs.forced import constrained
from rl4llm.envs.wire import Answer, Asked, RequestError
from rl4llm.extensions.agents.history import Continuation, Entry, History
from rl4llm.runtime.seeds import derive_seed

CONVERSATION = ("messages", "input")  # the fields that hold it


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused request: why, and digests of what its messages say."""

    reason: str
    messages: tuple[str, ...]

    def repeated_by(self, messages: tuple[str, ...]) -> bool:
        """Return whether a request asks this again: it begins with the same messages, or ends with the same one."""
        same = self.messages[-1:] and messages[-1:] == self.messages[-1:]
        return bool(same) or messages[: len(self.messages)] == self.messages


def _messages(body: Any) -> tuple[str, ...]:
    """Return a digest of each message of a request: its texts, and what a call returned, without parts that are refused."""
    fields = body if isinstance(body, dict) else {}
    rows: Any = next((fields[name] for name in CONVERSATION if name in fields), [])
    return tuple(_digest(row) for row in (rows if isinstance(rows, list) else [rows]))


def _digest(row: Any) -> str:
    fields = row if isinstance(row, dict) else {"content": row}
    content = fields.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text", part.get("content")) if isinstance(part, dict) else part for part in parts]
    named = [fields.get(name) for name in ("tool_call_id", "call_id", "output", "arguments", "tool_calls")]
    return xxhash.xxh3_64_hexdigest(
        repr(["".join(map(str, filter(None, texts))), named]).encode(errors="replace")
    )


class AgentSession:
    """Answers the requests of one episode, and keeps its token records.

    `key` is the secret in its requests. `over` is done when the episode has to end whatever the agent does: with None
    if the sample failed, else with the error that stops the run. `ran_into` is the limit that refused the last request,
    as a stop reason. `refusals` are the requests that were refused for another reason, and not answered later.
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
        self.ignored: Counter[str] = Counter()
        self.refused = 0
        self.refusals: list[Refusal] = []
        self.kept: dict[str, tuple[ChatMessage, ...]] = {}
        self.stored: dict[str, tuple[Asked, Answer]] = {}
        self._pictures: dict[Image, Picture] = {}
        self.context_length = llm.context_length
        self._llm, self.dialects, self._max_requests = llm, dialects, max_requests
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
        self.ignored.update(asked.ignored)
        if self.requests >= self._max_requests:
            self._refuse(
                "max_steps", f"All {self._max_requests} requests of this episode are used up (env.max_steps)."
            )
        dialect, place = self._placed(asked)
        prompt = place.prompt
        ids, images = prompt.token_ids, prompt.images
        params = self._limited(asked, len(ids))
        sampling = await self._counted(asked, dialect, params, ids)
        seen = [item.image.digest for item in images]
        digest = xxhash.xxh3_64_hexdigest(f"{ids}{seen or ''}".encode())
        draw = self._draws[digest]  # a repeated question is a new draw, whichever request comes first
        self._draws[digest] += 1
        completion = await self._llm.complete(self.sample, ids, sampling, digest, draw, images=images)
        self.sampled_tokens += len(completion.token_ids)
        self.check_open()
        name = f"{digest}-{draw}"
        call_ids = (derive_seed("call", self.sample.session, name, i) for i in itertools.count())
        answer = dialect.answer(asked, completion, len(ids), params.stop, name, call_ids)
        self.sample.current_step += 1
        self._truncated = completion.finish_reason == "length"
        if self.ran_into == "context":  # the agent shortened its prompt
            self.ran_into = None
        said = read_message(answer.message)
        if asked.keep is not None:
            self.kept[answer.id], self.stored[answer.id] = (*asked.keep, said), (asked, answer)
        return answer, self.history.add(place, completion, said)

    def count(self, asked: Asked) -> int:
        """Return the number of tokens of a request's prompt. Raises RequestError as `answer` does."""
        return len(self._placed(asked)[1].prompt.token_ids)

    def note_refusal(self, body: Any, error: RequestError) -> None:
        """Remember a request that was refused, unless a limit of the episode did it, which `ran_into` tells."""
        self.refused += 1
        if error.code not in ("context_length_exceeded", "max_steps", "episode_over"):
            with suppress(RecursionError):
                self.refusals.append(Refusal(str(error), _messages(body)))
                return
            self.refusals.append(Refusal(str(error), ()))

    def note_answer(self, body: Any) -> None:
        """Forget the refusals of requests that this answered one repeats."""
        if self.refusals:
            messages = _messages(body)
            self.refusals = [refusal for refusal in self.refusals if not refusal.repeated_by(messages)]

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
        if count > self.context_length:
            self._refuse(
                "context",
                f"The request has {count} messages or tools, but the context length is {self.context_length} tokens.",
            )

    def _placed(self, asked: Asked) -> tuple[Dialect, Continuation]:
        most = self.dialects.longest_token * self.context_length
        if asked.characters > most:
            self._refuse(
                "context", "The messages are longer than any conversation that fits the policy's context."
            )
        try:
            dialect = self.dialects.of(asked.tools)
            messages = tuple(map(self._as_seen, asked.messages))
            return dialect, self.history.place(dialect.tools, messages, dialect.renderer)
        except (TemplateError, DataError, ConfigError) as error:
            raise RequestError(str(error), code="invalid_messages", param="messages") from error

    def _as_seen(self, message: ChatMessage) -> ChatMessage:
        """Return a message with the pictures of earlier requests for those that the model sees alike, by their digests.

        Raises DataError for images without `model.vision`.
        """
        if not message.parts:
            return message
        if (vision := self.dialects.vision) is None:
            raise DataError(f"the messages have images, {UNSEEN}")
        parts = (
            part if isinstance(part, str) else self._pictures.setdefault(vision.see(part), part)
            for part in message.parts
        )
        return replace(message, parts=tuple(parts))

    def _limited(self, asked: Asked, prompt_tokens: int) -> SamplingParams:
        """Return the run's parameters with the request's stop strings, and a token limit that the request and the
        context allow.
        """
        room = self.context_length - prompt_tokens
        if room < 1:
            self._refuse(
                "context",
                f"The prompt has {prompt_tokens} tokens, but the context length is {self.context_length}.",
            )
        stop = tuple(dict.fromkeys((*self.params.stop, *asked.stop)))
        return self.params.replace(
            max_tokens=min(self.params.max_tokens, asked.max_tokens or room, room), stop=stop
        )

    async def _counted(
        self, asked: Asked, dialect: Dialect, params: SamplingParams, ids: Sequence[int]
    ) -> SamplingParams:
        """Count a request unless it is refused; return its parameters with the grammar of what it forces."""
        self.requests += 1  # before others run, which are then refused beyond the limit
        try:
            params = await constrained(dialect, asked, params, ids, self._llm.constrains)
        except RequestError:
            self.requests -= 1
            raise
        self.check_open()
        return params

    def _refuse(self, limit: str, message: str) -> None:
        self.ran_into = limit
        code = {"context": "context_length_exceeded"}.get(limit, limit)
        raise RequestError(message, code=code, param="messages")
