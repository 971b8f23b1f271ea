"""The APIs of `WIRES` and `/v1/completions` of the served model, as clients of OpenAI and Anthropic ask for them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rl4llm.core.errors import ConfigError, DataError, TemplateError, unknown
from rl4llm.core.types import ChatMessage, Completion, SamplingParams, TokenSpan
from rl4llm.envs import chat_completions as chat
from rl4llm.envs.dialects import Dialect, Dialects
from rl4llm.envs.forced import constrained
from rl4llm.envs.wire import Answer, Asked, Fields, RequestError, Wire, dumps, flag_of
from rl4llm.extensions.servers.embedded.native import object_of, sampling_params, tokens_of
from rl4llm.inference.embedded.stops import text_of
from rl4llm.inference.local import LocalClient

if TYPE_CHECKING:
    from rl4llm.data.vision import Vision

OWN = ("temperature", "top_p", "top_k", "seed")  # sampling parameters of requests, beside what ends an answer
ENDED = (*OWN, "max_tokens", "stop")
PLAIN = ("model", "prompt", "logprobs", "stream", *ENDED)
PENALTIES = {
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
}  # not implemented
KEPT = 1024  # answers that requests of /v1/responses can continue by their ids
MOST_IGNORED = 20  # names that are logged
logger = logging.getLogger("rl4llm.embedded")
LOOK_S = 0.1  # how often a stream looks for new tokens
HIDDEN = Completion("", (), (), "length", 0)


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request, ready to sample."""

    id: str
    prompt: TokenSpan
    params: SamplingParams
    stream: bool


@dataclass(frozen=True, slots=True)
class ChatJob(Job):
    """A checked request for a chat completion."""

    asked: Asked
    dialect: Dialect
    wire: Wire


@dataclass(frozen=True, slots=True)
class TextJob(Job):
    """A checked request for a continuation of a text or of tokens."""

    logprobs: bool


class OpenAIEndpoints:
    """Turns requests into prompts of exact tokens and completions into answers. `name` is that of the served model."""

    def __init__(self, engine: LocalClient, tokenizer: Any, name: str, vision: Vision | None = None):
        self._engine, self._tokenizer, self.name = engine, tokenizer, name
        self.dialects = Dialects(tokenizer, vision=vision)
        self._ignored: set[str] = set()
        self._kept: dict[str, tuple[ChatMessage, ...]] = {}
        self._thread = ThreadPoolExecutor(1)  # only one, since renderers are not made for several

    def model(self) -> dict[str, Any]:
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "rl4llm"}
        return {**model, "max_model_len": self._engine.context_length}

    async def tokenize(self, body: Any) -> dict[str, Any]:
        """Return the token ids of a text. Raises RequestError."""
        body = object_of(body)
        if not isinstance(text := body.get("prompt"), str):
            raise RequestError("prompt must be a text.", param="prompt")
        self.check_size(len(text) // self.dialects.longest_token)
        special = bool(body.get("add_special_tokens", True))
        encode = partial(self._tokenizer, add_special_tokens=special)
        ids = list((await self._in_thread(encode, text))["input_ids"])
        return {"tokens": ids, "count": len(ids), "max_model_len": self._engine.context_length}

    def check_size(self, tokens: int) -> None:
        """Raise RequestError for a request of at least as many tokens, before anything is built of it."""
        if tokens > self._engine.context_length:
            problem = f"At least {tokens} tokens exceed the context of {self._engine.context_length}."
            raise RequestError(problem, code="context_length_exceeded")

    async def chat(self, body: Any, wire: Wire) -> ChatJob:
        """Check a request of an API. Raises RequestError."""
        request, params, dialect, prompt = await self._placed(body, wire)
        params = params.replace(
            stop=request.stop,
            stop_token_ids=dialect.renderer.stop_token_ids,
            max_tokens=self._limit(request.max_tokens, len(prompt.token_ids)),
        )
        params = await constrained(dialect, request, params, prompt.token_ids, self._engine.constrains)
        return ChatJob(secrets.token_hex(12), prompt, params, request.stream, request, dialect, wire)

    async def count(self, body: Any, wire: Wire) -> int:
        """Return the number of tokens of a request's prompt. Raises RequestError."""
        return len((await self._placed(body, wire))[-1].token_ids)

    async def _placed(self, body: Any, wire: Wire) -> tuple[Asked, SamplingParams, Dialect, TokenSpan]:
        fields = self._fields(body)
        params = sampling_params({name: fields.pop(name) for name in OWN if name in fields})
        for name in ("messages", "input", "tools"):
            self.check_size(len(fields[name]) if isinstance(fields.get(name), list) else 0)
        request = wire.read_request({"model": self.name, **fields}, params, self._kept)
        self.check_size(request.characters // self.dialects.longest_token)
        self._check_ignored(request.ignored)
        try:
            return request, params, *await self._in_thread(self._rendered, request)
        except (TemplateError, DataError, ConfigError) as error:
            raise RequestError(str(error), code="invalid_messages", param="messages") from error

    async def text(self, body: Any, wire: Wire) -> TextJob:
        """Check a request for a continuation, which errors of OpenAI's `wire` answer. Raises RequestError."""
        fields = self._fields(body)
        if ignored := Fields(fields, SamplingParams(), PLAIN).ignored:
            raise RequestError(unknown("/v1/completions: the field", ignored[0], PLAIN), param=ignored[0])
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            (prompt,) = prompt
        params = sampling_params({name: fields[name] for name in ENDED if name in fields})
        if isinstance(prompt, str):
            self.check_size(len(prompt) // self.dialects.longest_token)
            prompt_ids = list((await self._in_thread(self._tokenizer, prompt))["input_ids"])
        else:
            prompt_ids = tokens_of(prompt, "prompt")
        params = params.replace(max_tokens=self._limit(fields.get("max_tokens", 16), len(prompt_ids)))
        return TextJob(
            secrets.token_hex(12),
            TokenSpan.context(prompt_ids),
            params,
            flag_of(fields, "stream"),
            fields.get("logprobs") not in (None, False),
        )

    async def answer(self, job: ChatJob | TextJob) -> dict[str, Any]:
        """Return the JSON of a whole answer."""
        completion = await self._sampled(job)
        if isinstance(job, TextJob):
            return self._text_body(job, completion)
        return job.wire.answer_body(job.asked, self._chat_answer(job, completion))

    async def events(self, job: ChatJob | TextJob) -> AsyncIterator[str]:
        """Yield the server-sent events of an answer, of OpenAI's chat and of texts while it is sampled."""
        if isinstance(job, ChatJob) and job.wire is not chat:
            for event in job.wire.events(job.asked, self._chat_answer(job, await self._sampled(job))):
                yield event
            return
        async for chunk in self._chat_chunks(job) if isinstance(job, ChatJob) else self._text_chunks(job):
            yield f"data: {dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    async def _text_chunks(self, job: TextJob) -> AsyncIterator[dict[str, Any]]:
        async for piece, completion in self._live(job):
            yield self._text_body(job, completion, piece)

    async def _chat_chunks(self, job: ChatJob) -> AsyncIterator[dict[str, Any]]:
        request, length, usage = job.asked, None, job.asked.stream_usage
        async for piece, completion in self._live(job):
            if completion is not None:
                answer = self._chat_answer(job, completion)
            elif request.tools or request.logprobs:  # which are known at the end
                continue
            else:
                partial = job.dialect.answer(request, HIDDEN, 0, (), job.id, itertools.count())
                if length is None:
                    opened = {"role": "assistant", "content": partial.content}
                    yield chat.chunk_of(partial, opened, usage=usage)
                    length = len(partial.content)
                yield chat.chunk_of(partial, {"content": piece}, usage=usage)
                length += len(piece)
        for chunk in chat.chunks(answer, usage=usage, shown=length):
            yield chunk

    async def _in_thread(self, function: Callable[..., Any], argument: Any) -> Any:
        """Return what a function returns that would stop the event loop for long texts."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, argument)

    def _rendered(self, request: Asked) -> tuple[Dialect, TokenSpan]:
        """Return the dialect and the prompt of a request. Raises TemplateError, DataError or ConfigError."""
        dialect = self.dialects.of(request.tools)
        token_ids = dialect.renderer.prompt(request.messages)
        return dialect, dialect.renderer.context(token_ids, request.messages)

    async def _sampled(self, job: Job, session: str = "") -> Completion:
        ids, images = job.prompt.token_ids, job.prompt.images
        return await self._engine.generate(ids, job.params, session=session, images=images)

    async def _live(self, job: Job) -> AsyncIterator[tuple[str, Completion | None]]:
        """Yield new text while it is sampled, then the rest with the completion. What may begin a stop string waits."""
        session = f"stream/{job.id}"
        sampling = asyncio.ensure_future(self._sampled(job, session))
        sent, margin = "", max(map(len, job.params.stop), default=1) - 1
        try:
            while not (await asyncio.wait({sampling}, timeout=LOOK_S))[0]:
                text = text_of(self._tokenizer, self._engine.sampled(session), job.params.stop)
                text = text[: len(text) - margin]
                if len(text) > len(sent) and text.startswith(sent) and not text.endswith("\ufffd"):
                    piece, sent = text[len(sent) :], text
                    yield piece, None
            completion = await sampling
            yield completion.text[len(sent) :], completion
        finally:
            sampling.cancel()
            await self._engine.release(session)

    def _fields(self, body: Any) -> dict[str, Any]:
        fields = {name: value for name, value in object_of(body).items() if value is not None}
        if fields.get("model", self.name) != self.name:
            problem = f"model={fields['model']!r:.100} is not served here. Accepted: {self.name!r}."
            raise RequestError(problem, status=404, code="model_not_found", param="model")
        return fields

    def _check_ignored(self, names: Sequence[str]) -> None:
        """Log each field once that is not read. Raises RequestError for one that would change the sampling."""
        for name in PENALTIES.intersection(names):
            raise RequestError(f"{name} is not accepted by the embedded engine. Remove it.", param=name)
        for name in sorted({name[:60] for name in names} - self._ignored)[
            : MOST_IGNORED - len(self._ignored)
        ]:
            self._ignored.add(name)
            logger.warning("Requests set %r, which is ignored.", name)

    def _limit(self, asked: Any, prompt_tokens: int) -> int:
        """Return how many tokens an answer may have. Raises RequestError if the context cannot hold as many as asked."""
        room = self._engine.context_length - prompt_tokens
        limit = room if asked is None else asked
        if type(limit) is not int or limit < min(room, 1) or room < max(1, limit):
            problem = f"max_tokens={asked!r:.100} is not accepted: {room} tokens are left in the context."
            raise RequestError(problem, code="context_length_exceeded", param="max_tokens")
        return limit

    def _chat_answer(self, job: ChatJob, completion: Completion) -> Answer:
        ids = (secrets.randbits(36) for _ in itertools.count())
        prompt_tokens = len(job.prompt.token_ids)
        answer = job.dialect.answer(job.asked, completion, prompt_tokens, job.asked.stop, job.id, ids)
        if job.asked.keep is not None and not any(message.parts for message in job.asked.keep):
            self._kept[job.id] = (*job.asked.keep, chat.read_message(answer.message))
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return answer

    def _text_body(
        self, job: TextJob, completion: Completion | None, piece: str | None = None
    ) -> dict[str, Any]:
        """Return the JSON of an answer, or with `piece` of a part of it."""
        head = {"id": f"cmpl-{job.id}", "object": "text_completion", "created": int(time.time())}
        choice: dict[str, Any] = {"index": 0, "text": piece, "logprobs": None, "finish_reason": None}
        if completion is None:
            return {**head, "model": self.name, "choices": [choice]}
        choice |= {
            "text": completion.text if piece is None else piece,
            "finish_reason": completion.finish_reason,
        }
        if job.logprobs:
            tokens = [self._tokenizer.decode([token]) for token in completion.token_ids]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": list(completion.logprobs)}
        new = len(completion.token_ids)
        usage = {"prompt_tokens": len(job.prompt.token_ids), "completion_tokens": new}
        usage["total_tokens"] = len(job.prompt.token_ids) + new
        return {**head, "model": self.name, "choices": [choice], "usage": usage}
