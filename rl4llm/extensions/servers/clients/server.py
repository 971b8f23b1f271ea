"""What the clients of all servers share: check, name and retry requests, and check replies before they count."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from yarl import URL

from rl4llm.core.allowed import can_constrain
from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import ConfigError, EngineError, RefusedError, UnreachableError
from rl4llm.core.images import ImagePlace
from rl4llm.core.model_memory import ONE_SEQUENCE, EngineLoad, ModelShape, Precision
from rl4llm.core.types import Completion, FinishReason, SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.together import Together
from rl4llm.inference.embedded.kv_cache import KVCache
from rl4llm.inference.embedded.stops import stop_tokens, text_of
from rl4llm.runtime.transport import Retry, Transport

if TYPE_CHECKING:
    from rl4llm.data.vision import Vision

NEVER_LOADED = -1
FINISHED: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
LOGPROBS = (-1e30, 1e-3)  # smallest and largest valid log-prob; rounding may lift one above 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """A server's answer before it is checked; `versions` are (start, version) of runs of tokens, in order.

    `answers` is the id of the request that the server reports to answer, if it reports one.
    """

    token_ids: Any
    logprobs: Any
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]
    answers: str | None = None


class DamagedReplyError(UnreachableError):
    """A reply that only damaged weights can give."""


class DoubleReplyError(UnreachableError):
    """A reply that answers another request."""


class RequestNames:
    """Ids for requests: step, prompt and sample (the session), turn, and a unique suffix.

    Two trainers, or one that was restarted, never send the same id.
    """

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(3)
        self._requests = 0
        self.turns: dict[str, int] = {}

    def next(self, session: str, what: str = "request") -> str:
        """Return the name of a session's next request, without its attempt."""
        self._requests += 1
        turn = self.turns.get(session, 0)
        if session:
            self.turns[session] = turn + 1
        return f"{session or what}/t{turn}/{self._nonce}-{self._requests}"

    def release(self, session: str) -> None:
        """Forget a session that is over."""
        self.turns.pop(session, None)


class ServerClient(BaseClient):
    """One inference server behind HTTP: token ids in, token ids and log-probs out.

    Args:
        base_url: for example "http://127.0.0.1:30000".
        tokenizer: decodes completions; the server's own text is not used, since every server trims it differently.
        vocab_size: token ids from here on are refused, since some servers crash on them.
        context_length: prompt plus completion, in tokens.
        ends: further tokens that end a completion, those of the model's generation config.
        deadline_s: for one attempt of a generation.
        admin_deadline_s: for loading weights and other requests of the operator.
        attempts: how often a request is tried if it fails with an error that may be temporary.
        visible_within_s: how long files that the trainer wrote may take to appear on the server's machine.
        api_key: sent as a bearer token; a run uses RL4LLM_SERVER_KEY if its configuration has none.
    """

    URL_VARIABLE: ClassVar[str]
    USUAL_URL: ClassVar[str]
    SAYS_VERSIONS: ClassVar[bool] = True
    """Whether replies contain the version of the weights, which a router requires."""
    UNSEEN: ClassVar[str]
    """A part of the error for files that the server does not see, or not yet."""

    is_server = True

    def __init__(
        self,
        base_url: str,
        tokenizer: Any,
        *,
        vocab_size: int,
        context_length: int,
        ends: Sequence[int] = (),
        deadline_s: float = 600.0,
        admin_deadline_s: float = 600.0,
        attempts: int = 4,
        visible_within_s: float = 10.0,
        api_key: str | None = None,
    ):
        try:
            address = URL(base_url)
        except ValueError:  # such as a port out of range
            address = URL()
        if not address.host or address.scheme not in ("http", "https"):
            raise ConfigError(f"inference.url={base_url!r} is not accepted. Accepted: http://HOST:PORT.")
        self.base_url = base_url.rstrip("/")
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.retry = Retry(attempts)
        self.http = Transport(base_url, deadline_s=deadline_s, api_key=api_key)
        self.admin_deadline_s = admin_deadline_s
        self._visible_within_s = visible_within_s
        self._tokenizer, self._ends = tokenizer, tuple(ends)
        self.names = RequestNames()
        self.vision: Vision | None = None  # what the model makes of images; set for runs with any
        self.autocast = ""  # of the trainer's products, in a run
        self.weights_name = secrets.token_hex(8)  # of what the server holds, new after each load
        self.digest: str | None = None  # `checksum` after the last load
        self.together = Together()  # a fleet has one for all its clients
        self._loading = asyncio.Lock()

    @classmethod
    def usual_url(cls) -> str:
        """Return the default address: that of the environment variable, or the server's default port on this machine."""
        return os.environ.get(cls.URL_VARIABLE, cls.USUAL_URL)

    @classmethod
    def memory(
        cls, shape: ModelShape, precision: Precision, options: Mapping[str, Any], load: EngineLoad
    ) -> dict[str, int]:
        """Return the bytes on the trainer's device: nothing, or with `cohost` the least that a server needs.

        That is the whole model in the dtype that the trainer computes in, and a cache for one sequence, since requests that
        do not fit the cache wait.
        """
        if not options.get("cohost"):
            return {}
        cache = KVCache.memory(shape, 1, load.longest, precision.computed)
        return {"server's weights": shape.parameters * precision.computed, ONE_SEQUENCE: cache}

    def __str__(self) -> str:
        return f"{type(self).__name__} at {self.base_url}"

    @property
    def constrains(self) -> bool:
        return can_constrain(self._tokenizer)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        self.check_prompt(prompt_ids, images)
        name = self.names.next(session)
        return await self.retry.run(
            lambda attempt: self.attempt(prompt_ids, sampling_params, f"{name}/a{attempt}", images)
        )

    async def attempt(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        """Try once to sample a completion, under an id that was never used before."""
        room = self.context_length - len(prompt_ids)
        params = sampling_params.replace(
            max_tokens=min(sampling_params.max_tokens, room),
            stop_token_ids=stop_tokens(self._tokenizer, sampling_params, self._ends),
        )
        sampled = await self.sample(list(prompt_ids), params, request_id, images)
        try:
            self._check_sampled(sampled, request_id)
        except DoubleReplyError:
            await self.http.renew()  # on this connection the next answer would belong to this request
            raise
        sampled = cut_after(sampled, params.stop_token_ids)
        token_ids = tuple(sampled.token_ids)
        return Completion(
            text=text_of(self._tokenizer, token_ids, params.stop),
            token_ids=token_ids,
            logprobs=tuple(min(float(logprob), 0.0) for logprob in sampled.logprobs),
            finish_reason=sampled.finish_reason,
            version=sampled.versions[0][1],
            versions=sampled.versions if len(sampled.versions) > 1 else (),
            grammar=params.grammar,
        )

    @abstractmethod
    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, images: Sequence[ImagePlace]
    ) -> Sampled:
        """Send one request; raise UnreachableError for temporary errors, RefusedError for others."""

    @abstractmethod
    async def load_weights(self, weight_ref: WeightRef) -> None:
        """Have the server load weights; not its answer but `version` shows whether it did."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop generating at the next token; requests wait."""

    @abstractmethod
    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Give device memory back."""

    @abstractmethod
    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take device memory again."""

    @abstractmethod
    async def health(self) -> dict[str, Any]:
        """Return what the server reports about itself; raise EngineError if it cannot serve."""

    async def flush(self) -> None:
        """Forget the prefix cache."""

    async def lacks_weights(self) -> bool:
        """Return whether the server sleeps without weights on its device, so that none can be loaded."""
        return False

    async def check_awake(self) -> None:
        """Raise EngineError if a trainer with inference.cohost=true ended before it gave the device back."""
        if await self.lacks_weights():
            raise EngineError(f"{self} is asleep. Resume the run that it belongs to, or restart it.")

    async def checksum(self) -> str | None:
        """Return a digest of the weights on the server; None if the server cannot compute one."""
        return None

    async def load(self, weight_ref: WeightRef) -> None:
        """Pause, load, resume in any case, and read back the version; raise EngineError if the server holds another one."""
        if weight_ref.held:
            if (version := await self.version()) != weight_ref.version:
                raise UnreachableError(f"{self} holds version {version}, not {weight_ref.version}.")
            self.weights_name, self.digest = secrets.token_hex(8), await self.checksum()
            return
        async with self._loading:
            await self.check_awake()
            seen_by = time.monotonic() + self._visible_within_s
            for number in itertools.count():
                before, problem, version = await self._replace_weights(weight_ref)
                unseen = isinstance(problem, RefusedError) and self.UNSEEN in str(problem)
                if version != before or not unseen or time.monotonic() > seen_by:
                    break
                await asyncio.sleep(self.retry.wait_s(number))
        if version != weight_ref.version or (problem and before == version):
            raise EngineError(
                f"{self.base_url} holds version {version} after a request to load version {weight_ref.version} from "
                f"{weight_ref.path or 'the trainer'}. {problem or 'See the log of the server.'}"
            ) from problem

    async def _replace_weights(self, weight_ref: WeightRef) -> tuple[int, EngineError | None, int]:
        """Return the version before, the error, if any, and the version after: it may be the new one in spite of an error.

        The pause comes first, since a busy server may answer no request before the end of a step.
        """
        try:
            await self.pause()
            before = await self.version()
            problem: EngineError | None = None
            try:
                await self.load_weights(weight_ref)
            except EngineError as error:
                problem = error
                try:
                    await self.flush()  # the cache may be that of the old weights
                except EngineError as second:
                    raise type(second)(f"{second} (while recovering from a failed load: {error})") from error
            version = await self.version()
            if version == weight_ref.version:
                self.digest = await self.checksum()
            return before, problem, version
        finally:
            self.weights_name = secrets.token_hex(8)
            await self.retry.run(lambda _: self.resume())

    async def release(self, session: str) -> None:
        self.names.release(session)

    async def disconnect(self) -> None:
        await self.http.close()

    def check_prompt(self, prompt_ids: Sequence[int], images: Sequence[ImagePlace] = ()) -> None:
        """Raise EngineError for a prompt that a server would refuse, or crash on."""
        outside = [token for token in prompt_ids if not 0 <= token < self.vocab_size]
        if images and not (self.takes_images and self.vision):
            raise EngineError(f"generate: {self} takes no images. Use inference.name=local.")
        if outside or not 0 < len(prompt_ids) < self.context_length:
            raise EngineError(
                f"generate: a prompt of {len(prompt_ids)} tokens is not accepted. Accepted: 1 to {self.context_length - 1} "
                f"ids below {self.vocab_size}, not {outside[:1]}."
            )

    def _check_sampled(self, sampled: Sampled, request_id: str) -> None:
        """Raise UnreachableError for an answer that cannot be what the model sampled for this request."""
        where = f"{self.base_url} answered request {request_id}"
        token_ids, logprobs = sampled.token_ids, sampled.logprobs
        if sampled.answers not in (None, request_id):
            raise DoubleReplyError(f"{where} with the answer to {sampled.answers}.")
        if not isinstance(token_ids, list) or not isinstance(logprobs, list):
            raise UnreachableError(f"{where} without token ids or without log-probs.")
        starts = [start for start, _ in sampled.versions]
        if (
            not (token_ids or sampled.finish_reason == "abort")
            or not all(type(token) is int and 0 <= token < self.vocab_size for token in token_ids)
            or (starts[:1] != [0] or starts != sorted(set(starts)) or starts[-1] > max(0, len(token_ids) - 1))
        ):
            raise UnreachableError(
                f"{where} with invalid tokens {token_ids!r:.99} or versions from {starts}."
            )
        least, most = LOGPROBS  # a NaN is not between them
        valid = all(isinstance(item, int | float) and least <= item <= most for item in logprobs)
        if len(token_ids) != len(logprobs) or not valid:
            raise DamagedReplyError(
                f"{where} with missing or invalid log-probs (NaN or out of range). Its weights are probably corrupted."
            )


def cut(sampled: Sampled, end: int) -> Sampled:
    """Return an answer that a stop token or string ends at its token `end`."""
    versions = tuple((start, version) for start, version in sampled.versions if start < end)
    return Sampled(sampled.token_ids[:end], sampled.logprobs[:end], "stop", versions)


def cut_after(sampled: Sampled, stop_token_ids: Sequence[int]) -> Sampled:
    """Cut an answer after its first stop token; with `ignore_eos` servers continue past them."""
    end = next((place for place, token in enumerate(sampled.token_ids, 1) if token in stop_token_ids), None)
    return sampled if end in (None, len(sampled.token_ids)) else cut(sampled, end)


def field(answer: Any, name: str, what: str) -> Any:
    """Return a field of a server's answer to `what`; raise UnreachableError if it is missing."""
    if not isinstance(answer, Mapping) or name not in answer:
        raise UnreachableError(f"A server's answer to {what} has no {name!r}.")
    return answer[name]


def sampling_options(params: SamplingParams) -> dict[str, Any]:
    """Return options that have the same name on all servers. All that change probabilities are sent: defaults differ."""
    options: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
    }
    return options | ({"stop": list(params.stop)} if params.stop else {})
