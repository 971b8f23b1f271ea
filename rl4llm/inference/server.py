"""What the clients of all servers share: requests are checked, named and retried, replies checked before they count."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import ConfigError, EngineError, UnreachableError
from rl4llm.core.types import Completion, FinishReason, SamplingParams, WeightRef
from rl4llm.inference.transport import Retry, Transport


@dataclass(frozen=True, slots=True)
class Sampled:
    """A server's answer before it is believed; `versions` are (start, version) of runs of tokens, in order."""

    token_ids: Any
    logprobs: Any
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]


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
        api_key: sent as a bearer token.
    """

    URL_VARIABLE: ClassVar[str]
    USUAL_URL: ClassVar[str]

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
        api_key: str | None = None,
    ):
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"inference.url={base_url!r} is not accepted: http://HOST:PORT, as the server's log says it.")
        self.base_url = base_url.rstrip("/")
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.retry = Retry(attempts)
        self.http = Transport(base_url, deadline_s=deadline_s, api_key=api_key)
        self.admin_deadline_s = admin_deadline_s
        self._tokenizer = tokenizer
        self._nonce = secrets.token_hex(3)  # two trainers, or one that was restarted, never send the same request id
        self._requests = 0
        self._turns: dict[str, int] = {}
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
        name = self.request_name(session)
        return await self.retry.run(lambda attempt: self.attempt(prompt_ids, sampling_params, f"{name}/a{attempt}"))

    async def attempt(self, prompt_ids: Sequence[int], sampling_params: SamplingParams, request_id: str) -> Completion:
        """One attempt at a completion, under an id that was never used before."""
        room = self.context_length - len(prompt_ids)
        params = sampling_params.replace(max_tokens=min(sampling_params.max_tokens, room))
        sampled = await self.sample(list(prompt_ids), self.with_end_token(params), request_id)
        self._check_sampled(sampled, request_id)
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

    async def load(self, weight_ref: WeightRef) -> None:
        """Stop what runs, load, go on whatever happened, and read back what the server then holds."""
        async with self._loading:
            await self.pause()
            try:
                await self.load_weights(weight_ref)
            finally:
                await self.resume()
            version = await self.version()
        if version != weight_ref.version:
            raise EngineError(
                f"{self.base_url} was told to load version {weight_ref.version} from {weight_ref.path}, and holds version "
                f"{version} instead. Look for the reason in the server's log."
            )

    async def release(self, session: str) -> None:
        self._turns.pop(session, None)

    async def close(self) -> None:
        await self.http.close()

    def request_name(self, session: str) -> str:
        """The name of a session's next request: step, prompt and sample, turn, and what makes it unique."""
        self._requests += 1
        turn = self._turns.get(session, 0)
        if session:
            self._turns[session] = turn + 1
        return f"{session or 'request'}/t{turn}/{self._nonce}-{self._requests}"

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

    def with_end_token(self, params: SamplingParams) -> SamplingParams:
        """The tokenizer's end token as a stop token, since a server knows only its own model's configuration."""
        end = self._tokenizer.eos_token_id
        if params.ignore_eos or end is None or end in params.stop_token_ids:
            return params
        return params.replace(stop_token_ids=(*params.stop_token_ids, end))

    def _check_sampled(self, sampled: Sampled, request_id: str) -> None:
        problem = _problem(sampled, self.vocab_size)
        if problem:
            raise UnreachableError(f"{self.base_url} answered request {request_id} with {problem}.")

    def _text(self, token_ids: Sequence[int], stops: Sequence[str]) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
        return text[: min(places)] if places else text


def _problem(sampled: Sampled, vocab_size: int) -> str | None:
    """What is wrong with an answer; None when nothing is."""
    token_ids, logprobs = sampled.token_ids, sampled.logprobs
    if not isinstance(token_ids, list) or not isinstance(logprobs, list):
        return "no token ids or no log-probs"
    if not token_ids and sampled.finish_reason != "abort":
        return "no tokens"
    if len(token_ids) != len(logprobs):
        return f"{len(token_ids)} tokens but {len(logprobs)} log-probs"
    if not all(type(token) is int and 0 <= token < vocab_size for token in token_ids):
        return f"token ids outside the vocabulary of {vocab_size}"
    if not all(isinstance(logprob, int | float) and math.isfinite(logprob) for logprob in logprobs):
        return "log-probs that are no numbers, which is what damaged weights look like"
    return None
