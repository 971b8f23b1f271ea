"""The contract of inference clients, as a check."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import EngineError
from rl4llm.core.types import SamplingParams
from rl4llm.runtime.runner import run

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
Laws = AsyncIterator[tuple[str, bool]]
"""Each law of the contract, and whether the client keeps it."""


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
    run(_check(client, [list(prompt) for prompt in prompts], tolerance, seeded))


async def _check(client: BaseClient, prompts: list[list[int]], tolerance: float, seeded: bool) -> None:
    laws = [_shape(client, prompts[0]), _greedy(client, prompts), _logprobs(client, prompts[0], tolerance)]
    laws += [_stops(client, prompts[0]), _sessions(client, prompts[0]), _errors(client)]
    for group in [*laws, _seeds(client, prompts)] if seeded else laws:
        async for law, holds in group:
            if not holds:
                raise EngineError(f"check_client: the client breaks this law: {law}.")
    await client.disconnect()


async def _shape(client: BaseClient, prompt: list[int]) -> Laws:
    completion = await client.generate(prompt, SAMPLED)
    inside = all(0 <= token < client.vocab_size for token in completion.token_ids)
    yield "with ignore_eos a completion has max_tokens tokens", len(completion.token_ids) == 12
    yield (
        "a completion that ran into max_tokens finished with 'length'",
        completion.finish_reason == "length",
    )
    yield "a completion carries the version of the weights", completion.version == await client.version()
    yield "tokens lie in the vocabulary", inside
    yield "log-probs are not above 0", all(logprob <= 0 for logprob in completion.logprobs)


async def _greedy(client: BaseClient, prompts: list[list[int]]) -> Laws:
    alone = [(await client.generate(prompt, GREEDY)).token_ids for prompt in prompts]
    together = await asyncio.gather(*(client.generate(prompt, GREEDY) for prompt in prompts))
    same = alone == [completion.token_ids for completion in together]
    yield "at temperature 0 equal prompts give equal tokens, alone or in company", same


async def _seeds(client: BaseClient, prompts: list[list[int]]) -> Laws:
    params = [SAMPLED.replace(seed=seed) for seed in range(4)]
    group = await asyncio.gather(*(client.generate(prompts[0], item) for item in params))
    company = [client.generate(prompt, SAMPLED.replace(seed=9)) for prompt in prompts[1:]]
    mixed = await asyncio.gather(*company, *(client.generate(prompts[0], item) for item in reversed(params)))
    tokens, repeated = (
        [item.token_ids for item in items] for items in (group, mixed[: -len(group) - 1 : -1])
    )
    yield "equal seeds give equal tokens, whatever else the engine does, in any order", tokens == repeated
    yield "different seeds give different tokens", len(set(tokens)) > 1


async def _logprobs(client: BaseClient, prompt: list[int], tolerance: float) -> Laws:
    for params in (GREEDY, SAMPLED):
        completion = await client.generate(prompt, params)
        scores = await client.score([*prompt, *completion.token_ids])
        yield "score gives one log-prob to each token after the first", len(scores) == len(prompt) + 11
        pairs = zip(completion.logprobs, scores[-12:], strict=True)
        worst = max(abs(logprob - score) for logprob, score in pairs)
        law = f"a completion's log-probs equal score() to {tolerance:g} (they differ by {worst:.1e})"
        yield law, worst <= tolerance


async def _stops(client: BaseClient, prompt: list[int]) -> Laws:
    free = await client.generate(prompt, GREEDY)
    stop = free.token_ids[5]
    expected = free.token_ids[: free.token_ids.index(stop) + 1]
    completion = await client.generate(prompt, GREEDY.replace(stop_token_ids=(stop,)))
    yield "a stop token ends the completion and is kept", completion.token_ids == expected
    yield "a completion that met a stop token finished with 'stop'", completion.finish_reason == "stop"
    if len(free.text) >= 4 and "\ufffd" not in free.text:
        string = free.text[2:4]
        completion = await client.generate(prompt, GREEDY.replace(stop=(string,)))
        same = completion.token_ids == free.token_ids[: len(completion.token_ids)]
        yield "text is cut before a stop string", completion.text == free.text[: free.text.index(string)]
        yield "a stop string does not change the tokens before it", same
        yield "a completion that met a stop string finished with 'stop'", completion.finish_reason == "stop"


async def _sessions(client: BaseClient, prompt: list[int]) -> Laws:
    short = GREEDY.replace(max_tokens=4)
    await client.expect("check_client")
    turn = await client.generate(prompt, short, session="check_client")
    longer = [*prompt, *turn.token_ids, *prompt[:2]]
    later = await client.generate(longer, short, session="check_client")
    await client.release("check_client")
    fresh = await client.generate(longer, short)
    yield "a later turn of a session gives what a fresh request gives", later.token_ids == fresh.token_ids


async def _errors(client: BaseClient) -> Laws:
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
        yield f"{case} raises EngineError", False
