"""What the clients of all servers share: requests are checked, named and retried, replies checked before they count."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from yarl import URL

from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import ConfigError, EngineError, RefusedError, UnreachableError
from rl4llm.core.types import Completion, FinishReason, SamplingParams, WeightRef
from rl4llm.inference.stops import stop_tokens
from rl4llm.inference.transport import Retry, Transport

LOGPROBS = (-1e30, 1e-3)  # the least that is a number, and how far above 0 rounding may lift one


@dataclass(frozen=True, slots=True)
class Sampled:
    """A server's answer before it is believed; `versions` are (start, version) of runs of tokens, in order.

    `answers` is the id of the request that the server says it answers, where it says so.
    """

    token_ids: Any
    logprobs: Any
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]
    answers: str | None = None


class DamagedReplyError(UnreachableError):
    """A reply that no undamaged weights could give."""


class DoubleReplyError(UnreachableError):
    """A reply to another request, which has its own already."""


class RequestNames:
    """Ids for requests: step, prompt and sample (the session), turn, and what makes each unique.

    Two trainers, or one that was restarted, never send the same id.
    """

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(3)
        self._requests = 0
        self.turns: dict[str, int] = {}

    def next(self, session: str, what: str = "request") -> str:
        """The name of a session's next request, without its attempt."""
        self._requests += 1
        turn = self.turns.get(session, 0)
        if session:
            self.turns[session] = turn + 1
        return f"{session or what}/t{turn}/{self._nonce}-{self._requests}"

    def release(self, session: str) -> None:
        """The session is over."""
        self.turns.pop(session, None)


class ServerClient(BaseClient):
    """One inference server behind HTTP: token ids in, token ids and log-probs out.

    Args:
        base_url: for example "http://127.0.0.1:30000".
        tokenizer: for the text of completions; the server's own text is not used, as every server trims it differently.
        vocab_size: ids from here on are refused here, since some servers die of them.
        context_length: prompt plus completion, in tokens.
        deadline_s: for one attempt of a generation.
        admin_deadline_s: for loading weights and other requests of the operator.
        attempts: how often a request is tried that failed in a way that may pass.
        visible_within_s: how long files that the trainer wrote may take to show on the server's machine.
        api_key: sent as a bearer token; a run takes RL4LLM_SERVER_KEY where its configuration has none.
    """

    URL_VARIABLE: ClassVar[str]
    USUAL_URL: ClassVar[str]
    SAYS_VERSIONS: ClassVar[bool] = True
    """Whether replies say which weights they are from, so that they can be told apart behind a router."""
    UNSEEN: ClassVar[str]
    """What is in the refusal of files that the server does not see, or not yet."""

    def __init__(
        self,
        base_url: str,
        tokenizer: Any,
        *,
        vocab_size: int,
        context_length: int,
        deadline_s: float = 600.0,
        admin_deadline_s: float = 600.0,
        attempts: int = 4,
        visible_within_s: float = 10.0,
        api_key: str | None = None,
    ):
        if not _is_address(base_url):
            raise ConfigError(f"inference.url={base_url!r} is not accepted: http://HOST:PORT, as the server's log says it.")
        self.base_url = base_url.rstrip("/")
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.retry = Retry(attempts)
        self.http = Transport(base_url, deadline_s=deadline_s, api_key=api_key)
        self.admin_deadline_s = admin_deadline_s
        self._visible_within_s = visible_within_s
        self._tokenizer = tokenizer
        self.names = RequestNames()
        self._loading = asyncio.Lock()

    @classmethod
    def usual_url(cls) -> str:
        """Where the server is when nobody says."""
        return os.environ.get(cls.URL_VARIABLE, cls.USUAL_URL)

    def __str__(self) -> str:
        return f"{type(self).__name__} at {self.base_url}"

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: SamplingParams, *, session: str = ""
    ) -> Completion:
        self.check_prompt(prompt_ids)
        name = self.names.next(session)
        return await self.retry.run(lambda attempt: self.attempt(prompt_ids, sampling_params, f"{name}/a{attempt}"))

    async def attempt(self, prompt_ids: Sequence[int], sampling_params: SamplingParams, request_id: str) -> Completion:
        """One attempt at a completion, under an id that was never used before."""
        room = self.context_length - len(prompt_ids)
        params = sampling_params.replace(
            max_tokens=min(sampling_params.max_tokens, room),
            stop_token_ids=stop_tokens(self._tokenizer, sampling_params),  # a server knows only its own model's
        )
        try:
            sampled = await self.sample(list(prompt_ids), params, request_id)
        except RefusedError as error:
            raise RefusedError(f"Request {request_id} was refused. {error}") from error
        try:
            self._check_sampled(sampled, request_id)
        except DoubleReplyError:
            await self.http.renew()  # on the same connection the next answer would be this request's
            raise
        sampled = _cut(sampled, params.stop_token_ids)
        token_ids = tuple(sampled.token_ids)
        return Completion(
            text=self._text(token_ids, params.stop),
            token_ids=token_ids,
            logprobs=tuple(min(float(logprob), 0.0) for logprob in sampled.logprobs),
            finish_reason=sampled.finish_reason,
            version=sampled.versions[0][1],
            versions=sampled.versions if len(sampled.versions) > 1 else (),
        )

    @abstractmethod
    async def sample(self, prompt_ids: list[int], params: SamplingParams, request_id: str) -> Sampled:
        """Ask the server once; raises UnreachableError for what may pass, RefusedError for what will not."""

    @abstractmethod
    async def load_weights(self, weight_ref: WeightRef) -> None:
        """Have the server take over weights; what it answers is not the verdict, `version` is."""

    async def _check_held(self, weight_ref: WeightRef) -> None:
        if (version := await self.version()) != weight_ref.version:
            raise UnreachableError(
                f"{self.base_url} holds version {version} of the weights, and the first rank has still to give it "
                f"{weight_ref.version}."
            )

    async def flush(self) -> None:
        """Forget the prefix cache."""

    async def checksum(self) -> str | None:
        """A digest of the weights on the server; None from a server that cannot tell."""
        return None

    async def load(self, weight_ref: WeightRef) -> None:
        """Stop what runs, load, go on whatever happened, and read back what the server then holds."""
        if weight_ref.held:
            await self._check_held(weight_ref)
            return
        async with self._loading:
            before = await self.version()
            seen_by = time.monotonic() + self._visible_within_s
            for number in itertools.count():
                problem = await self._replace_weights(weight_ref)
                version = await self.version()
                unseen = isinstance(problem, RefusedError) and self.UNSEEN in str(problem)
                if version != before or not unseen or time.monotonic() > seen_by:
                    break
                await asyncio.sleep(self.retry.wait_s(number))
        if version != weight_ref.version or (problem and before == version):
            source = weight_ref.path or "the trainer"
            raise EngineError(
                f"{self.base_url} was told to load version {weight_ref.version} from {source}, and holds version {version} "
                f"instead. {problem or 'It reported success.'} Look for the reason in the server's log."
            ) from problem

    async def _replace_weights(self, weight_ref: WeightRef) -> EngineError | None:
        """What went wrong, if anything did; a server that reports a failure may hold the new weights all the same."""
        try:
            await self.pause()
            try:
                await self.load_weights(weight_ref)
            except EngineError as error:
                try:
                    await self.flush()  # what is cached may be of the old weights
                except EngineError as second:
                    raise type(second)(f"{second} It was to follow a load that failed: {error}") from error
                return error
            return None
        finally:
            await self.retry.run(lambda _: self.resume())

    async def release(self, session: str) -> None:
        self.names.release(session)

    async def disconnect(self) -> None:
        await self.http.close()

    async def close(self) -> None:
        await self.disconnect()

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Refuse what a server would refuse, or die of."""
        if not prompt_ids:
            raise EngineError("generate: the prompt is empty; give at least one token.")
        outside = [token for token in prompt_ids if not 0 <= token < self.vocab_size]
        if outside:
            raise EngineError(f"generate: token id {outside[0]} is outside the vocabulary: 0 to {self.vocab_size - 1}.")
        if len(prompt_ids) >= self.context_length:
            raise EngineError(
                f"generate: a prompt of {len(prompt_ids)} tokens leaves no room in the context of {self.context_length}."
            )

    def _check_sampled(self, sampled: Sampled, request_id: str) -> None:
        where = f"{self.base_url} answered request {request_id}"
        if sampled.answers not in (None, request_id):
            raise DoubleReplyError(f"{where} with the answer to {sampled.answers}.")
        problem = _problem(sampled, self.vocab_size)
        if problem:
            raise UnreachableError(f"{where} with {problem}.")
        if len(sampled.token_ids) != len(sampled.logprobs):
            raise DamagedReplyError(f"{where} with {len(sampled.token_ids)} tokens but {len(sampled.logprobs)} log-probs.")
        if not all(_is_logprob(logprob) for logprob in sampled.logprobs):
            raise DamagedReplyError(f"{where} with log-probs that are none, which is what damaged weights look like.")

    def _text(self, token_ids: Sequence[int], stops: Sequence[str]) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
        return text[: min(places)] if places else text


def _cut(sampled: Sampled, stop_token_ids: Sequence[int]) -> Sampled:
    """What was sampled up to the first stop token; servers sample on past them when told to ignore the model's end token."""
    end = next((place for place, token in enumerate(sampled.token_ids, 1) if token in stop_token_ids), None)
    if end is None or end == len(sampled.token_ids):
        return sampled
    versions = tuple((start, version) for start, version in sampled.versions if start < end)
    return Sampled(sampled.token_ids[:end], sampled.logprobs[:end], "stop", versions)


def _is_address(url: str) -> bool:
    try:
        found = URL(url)
    except ValueError:  # such as a port that is none
        return False
    return found.scheme in ("http", "https") and bool(found.host)


def _problem(sampled: Sampled, vocab_size: int) -> str | None:
    """What is wrong with an answer; None when nothing is."""
    token_ids, logprobs = sampled.token_ids, sampled.logprobs
    if not isinstance(token_ids, list) or not isinstance(logprobs, list):
        return "no token ids or no log-probs"
    if not token_ids and sampled.finish_reason != "abort":
        return "no tokens"
    if not all(type(token) is int and 0 <= token < vocab_size for token in token_ids):
        return f"token ids outside the vocabulary of {vocab_size}"
    starts = [start for start, _ in sampled.versions]
    if starts[:1] != [0] or starts != sorted(set(starts)) or starts[-1] > max(0, len(token_ids) - 1):
        return f"versions of the weights that begin at tokens {starts} of {len(token_ids)}"
    return None


def _is_logprob(value: Any) -> bool:
    least, most = LOGPROBS
    return isinstance(value, int | float) and least <= value <= most  # which no NaN is


def field(answer: Any, name: str, what: str) -> Any:
    """One field of a server's answer to `what`; raises UnreachableError for an answer that has none."""
    if not isinstance(answer, Mapping) or name not in answer:
        raise UnreachableError(f"A server's answer to {what} has no {name!r}.")
    return answer[name]
