"""An engine without a model, which gives the replies of a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import EngineError
from rl4llm.core.images import ImagePlace
from rl4llm.core.types import Completion, FinishReason, SamplingParams
from rl4llm.core.weights import WeightRef

Script = Mapping[str, Sequence[str]] | Callable[[str, Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ClientCall:
    """One request that a `ScriptedClient` got."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    session: str


class ScriptedClient(BaseClient):
    """An engine without a model, which returns the replies of a script.

        client = ScriptedClient(tokenizer, {"": ["Answer: 4"], "0/gsm8k-17/1": ["Let me see.", "Answer: 5"]})

    The script names the replies of each session in order; "" serves all other sessions, and a last reply is repeated. It
    may also be a function of the session and the prompt's tokens. Every reply ends with the tokenizer's end token unless
    `max_tokens` cuts it short. Each log-prob is -0.5. `calls`, `expected` and `released` tell what was asked.
    """

    LOGPROB = -0.5
    takes_images = True

    def __init__(self, tokenizer: Any, script: Script, *, context_length: int = 4096, delay_s: float = 0.0):
        self._tokenizer, self._script, self._delay_s = tokenizer, script, delay_s
        self.context_length, self.vocab_size = context_length, len(tokenizer)
        self.calls: list[ClientCall] = []
        self.expected: list[str] = []
        self.released: list[str] = []
        self._version = -1
        self._turns: dict[str, int] = {}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        self._check(prompt_ids)
        self.calls.append(ClientCall(tuple(prompt_ids), sampling_params, session))
        reply = self._reply(session, prompt_ids)
        await asyncio.sleep(self._delay_s)
        tokens = [
            *self._tokenizer.encode(reply, add_special_tokens=False, verbose=False),
            self._tokenizer.eos_token_id,
        ]
        token_ids = tuple(tokens[: min(sampling_params.max_tokens, self.context_length - len(prompt_ids))])
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        reason: FinishReason = "stop" if len(token_ids) == len(tokens) else "length"
        return Completion(text, token_ids, (self.LOGPROB,) * len(token_ids), reason, self._version)

    async def score(self, token_ids: Sequence[int], images: Sequence[ImagePlace] = ()) -> list[float]:
        return [self.LOGPROB] * (len(token_ids) - 1)

    async def load(self, weight_ref: WeightRef) -> None:
        self._version = weight_ref.version

    async def version(self) -> int:
        return self._version

    async def expect(self, session: str) -> None:
        self.expected.append(session)

    async def release(self, session: str) -> None:
        self.released.append(session)

    def _reply(self, session: str, prompt_ids: Sequence[int]) -> str:
        if callable(self._script):
            return self._script(session, prompt_ids)
        name = session if session in self._script else ""
        if not self._script.get(name):
            raise EngineError(f"ScriptedClient has no reply for session {session!r}.")
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        return self._script[name][min(turn, len(self._script[name]) - 1)]

    def _check(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids or not all(0 <= token < self.vocab_size for token in prompt_ids):
            raise EngineError(f"generate: the prompt needs token ids from 0 to {self.vocab_size - 1}.")
        if len(prompt_ids) >= self.context_length:
            raise EngineError(f"generate: the prompt leaves no room in the context of {self.context_length}.")
