"""What users run on their own parts: contract checks, and fakes that stand in for the expensive ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import EngineError
from rl4llm.core.types import Completion, SamplingParams, WeightRef

Script = Mapping[str, Sequence[str]] | Callable[[str, Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ClientCall:
    """One request that a `ScriptedClient` got."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    session: str


class ScriptedClient(BaseClient):
    """An engine that says what it is told to, without a model.

        client = ScriptedClient(tokenizer, {"": ["Answer: 4"], "0/gsm8k-17/1": ["Let me see.", "Answer: 5"]})

    The script names the replies of each session in order; "" serves all other sessions, and a last reply is repeated. It
    may also be a function of the session and the prompt's tokens. Every reply ends with the tokenizer's end token unless
    `max_tokens` cuts it short. Each log-prob is -0.5. `calls`, `expected` and `released` tell what was asked.
    """

    LOGPROB = -0.5

    def __init__(self, tokenizer: Any, script: Script, *, context_length: int = 4096, delay_s: float = 0.0):
        self._tokenizer, self._script, self._delay_s = tokenizer, script, delay_s
        self.context_length, self.vocab_size = context_length, len(tokenizer)
        self.calls: list[ClientCall] = []
        self.expected: list[str] = []
        self.released: list[str] = []
        self._version = -1
        self._turns: dict[str, int] = {}

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: SamplingParams, *, session: str = ""
    ) -> Completion:
        self._check(prompt_ids)
        self.calls.append(ClientCall(tuple(prompt_ids), sampling_params, session))
        reply = self._reply(session, prompt_ids)
        await asyncio.sleep(self._delay_s)
        tokens = [*self._tokenizer.encode(reply, add_special_tokens=False), self._tokenizer.eos_token_id]
        kept = tuple(tokens[: min(sampling_params.max_tokens, self.context_length - len(prompt_ids))])
        text = self._tokenizer.decode(list(kept), skip_special_tokens=True)
        reason = "stop" if len(kept) == len(tokens) else "length"
        return Completion(text, kept, (self.LOGPROB,) * len(kept), reason, self._version)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
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
            raise EngineError(f"ScriptedClient has no reply for session {session!r}; it knows {sorted(self._script)}.")
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        return self._script[name][min(turn, len(self._script[name]) - 1)]

    def _check(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise EngineError("generate: the prompt is empty; give at least one token.")
        wrong = [token for token in prompt_ids if not 0 <= token < self.vocab_size]
        if wrong:
            raise EngineError(f"generate: token id {wrong[0]} is outside the vocabulary: 0 to {self.vocab_size - 1}.")
        if len(prompt_ids) >= self.context_length:
            raise EngineError(
                f"generate: a prompt of {len(prompt_ids)} tokens leaves no room in the context of {self.context_length}."
            )


def check_client(
    client: BaseClient, prompts: Sequence[Sequence[int]], *, tolerance: float = 1e-4, seeded: bool = True
) -> None:
    """Check that an inference client keeps the contract of `BaseClient`; raises EngineError with the law it breaks.

    Args:
        client: the engine, with weights loaded.
        prompts: at least two different prompts, token ids, with room for 16 more tokens each.
        tolerance: how far log-probs may be from those of `score`.
        seeded: whether equal seeds must give equal tokens; some servers do not promise it.
    """
    if len({tuple(prompt) for prompt in prompts}) < 2:
        raise EngineError("check_client needs at least two different prompts.")
    asyncio.run(_check_all(client, [list(prompt) for prompt in prompts], tolerance, seeded))


async def _check_all(client: BaseClient, prompts: list[list[int]], tolerance: float, seeded: bool) -> None:
    await _check_shape(client, prompts[0])
    await _check_greedy(client, prompts)
    await _check_logprobs(client, prompts[0], tolerance)
    await _check_stops(client, prompts[0])
    await _check_sessions(client, prompts[0])
    await _check_errors(client)
    if seeded:
        await _check_seeds(client, prompts)
    await client.disconnect()


GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)


def _demand(holds: bool, law: str) -> None:
    if not holds:
        raise EngineError(f"check_client: the client breaks this law: {law}.")


async def _check_shape(client: BaseClient, prompt: list[int]) -> None:
    completion = await client.generate(prompt, SAMPLED)
    _demand(len(completion.token_ids) == 12, "with ignore_eos a completion has max_tokens tokens")
    _demand(completion.finish_reason == "length", "a completion that ran into max_tokens finished with 'length'")
    _demand(completion.version == await client.version(), "a completion carries the version of the weights")
    _demand(all(0 <= token < client.vocab_size for token in completion.token_ids), "tokens lie in the vocabulary")
    _demand(all(logprob <= 0 for logprob in completion.logprobs), "log-probs are not above 0")


async def _check_greedy(client: BaseClient, prompts: list[list[int]]) -> None:
    alone = [await client.generate(prompt, GREEDY) for prompt in prompts]
    together = await asyncio.gather(*(client.generate(prompt, GREEDY) for prompt in prompts))
    same = [one.token_ids == other.token_ids for one, other in zip(alone, together, strict=True)]
    _demand(all(same), "at temperature 0 equal prompts give equal tokens, alone or in company")


async def _check_seeds(client: BaseClient, prompts: list[list[int]]) -> None:
    params = [SAMPLED.replace(seed=seed) for seed in range(4)]
    group = await asyncio.gather(*(client.generate(prompts[0], item) for item in params))
    company = [client.generate(prompt, SAMPLED.replace(seed=9)) for prompt in prompts[1:]]
    again = await asyncio.gather(*company, *(client.generate(prompts[0], item) for item in reversed(params)))
    again = again[len(company) :][::-1]
    same = [one.token_ids == other.token_ids for one, other in zip(group, again, strict=True)]
    _demand(all(same), "equal seeds give equal tokens, whatever else the engine does, in any order")
    _demand(len({item.token_ids for item in group}) > 1, "different seeds give different tokens")


async def _check_logprobs(client: BaseClient, prompt: list[int], tolerance: float) -> None:
    for params in (GREEDY, SAMPLED):
        completion = await client.generate(prompt, params)
        scored = await client.score([*prompt, *completion.token_ids])
        _demand(len(scored) == len(prompt) + 11, "score gives one log-prob to each token after the first")
        pairs = zip(completion.logprobs, scored[-12:], strict=True)
        worst = max(abs(one - other) for one, other in pairs)
        _demand(worst <= tolerance, f"a completion's log-probs equal score() to {tolerance:g} (they differ by {worst:.1e})")


async def _check_stops(client: BaseClient, prompt: list[int]) -> None:
    free = await client.generate(prompt, GREEDY)
    stop = free.token_ids[5]
    expected = free.token_ids[: free.token_ids.index(stop) + 1]
    completion = await client.generate(prompt, GREEDY.replace(stop_token_ids=(stop,)))
    _demand(completion.token_ids == expected, "a stop token ends the completion and is kept")
    _demand(completion.finish_reason == "stop", "a completion that met a stop token finished with 'stop'")
    if len(free.text) >= 4 and "\ufffd" not in free.text:
        string = free.text[2:4]
        completion = await client.generate(prompt, GREEDY.replace(stop=(string,)))
        _demand(completion.text == free.text[: free.text.index(string)], "text is cut before a stop string")
        kept = len(completion.token_ids)
        _demand(completion.token_ids == free.token_ids[:kept], "a stop string does not change the tokens before it")
        _demand(completion.finish_reason == "stop", "a completion that met a stop string finished with 'stop'")


async def _check_sessions(client: BaseClient, prompt: list[int]) -> None:
    await client.expect("check_client")
    first = await client.generate(prompt, GREEDY.replace(max_tokens=4), session="check_client")
    longer = [*prompt, *first.token_ids, *prompt[:2]]
    second = await client.generate(longer, GREEDY.replace(max_tokens=4), session="check_client")
    await client.release("check_client")
    fresh = await client.generate(longer, GREEDY.replace(max_tokens=4))
    _demand(second.token_ids == fresh.token_ids, "a later turn of a session gives what a fresh request gives")


async def _check_errors(client: BaseClient) -> None:
    cases = {
        "an empty prompt": [],
        "a token id outside the vocabulary": [client.vocab_size],
        "a negative token id": [-1],
        "a prompt that leaves no room in the context": [0] * client.context_length,
    }
    for case, prompt in cases.items():
        try:
            await client.generate(prompt, GREEDY)
        except EngineError:
            continue
        _demand(False, f"{case} raises EngineError")
