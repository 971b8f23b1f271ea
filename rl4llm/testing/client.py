"""The contract of inference clients, as a check."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import EngineError
from rl4llm.core.types import SamplingParams
from rl4llm.runtime.runner import run


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
    run(_check_all(client, [list(prompt) for prompt in prompts], tolerance, seeded))


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
    _demand(
        completion.finish_reason == "length", "a completion that ran into max_tokens finished with 'length'"
    )
    _demand(completion.version == await client.version(), "a completion carries the version of the weights")
    _demand(
        all(0 <= token < client.vocab_size for token in completion.token_ids), "tokens lie in the vocabulary"
    )
    _demand(all(logprob <= 0 for logprob in completion.logprobs), "log-probs are not above 0")


async def _check_greedy(client: BaseClient, prompts: list[list[int]]) -> None:
    """Demand equal tokens from equal prompts at temperature 0."""
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
        _demand(
            worst <= tolerance,
            f"a completion's log-probs equal score() to {tolerance:g} (they differ by {worst:.1e})",
        )


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
        _demand(
            completion.token_ids == free.token_ids[:kept],
            "a stop string does not change the tokens before it",
        )
        _demand(
            completion.finish_reason == "stop", "a completion that met a stop string finished with 'stop'"
        )


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
