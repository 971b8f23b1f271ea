"""Requests that continue under new weights with the keys and values of the older ones."""

import asyncio
import copy

import pytest
import torch
from kept_cache import by_parts

from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.inference.local import LocalClient

PROMPTS = [[5, 9, 40, 33, 7], [5, 9, 40, 33, 7], [8, 100, 3]]
LONG = SamplingParams(max_tokens=24, temperature=0.7, ignore_eos=True)
WAYS = [("fast", 1), ("fast", 10**9), ("graph", 1), ("model", 1)]  # as in test_local


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)


async def steps(count):
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("path, share_from", WAYS)
def test_kept_keys_and_values_are_those_of_older_weights(build, tokenizer, path, share_from):
    model = build("qwen3")
    before = copy.deepcopy(model)
    client = LocalClient(model, tokenizer, path=path, share_from=share_from)

    async def run():
        await client.load(WeightRef(0))
        tasks = [
            asyncio.create_task(client.generate(prompt, LONG.replace(seed=seed), session=str(seed)))
            for seed, prompt in enumerate(PROMPTS)
        ]
        ended = await client.generate(PROMPTS[2], LONG.replace(max_tokens=3), session="over")
        change(model)
        prefilled = client._engine.describe()["prefill_tokens"]
        await client.load(WeightRef(1), keep_cache=True)
        await steps(2)
        joined = [asyncio.create_task(client.generate(PROMPTS[0], LONG.replace(seed=n))) for n in (7, 8)]
        under_way, later = await asyncio.gather(*tasks), await asyncio.gather(*joined)
        prefilled = client._engine.describe()["prefill_tokens"] - prefilled
        turns = []
        for session, first in (("2", under_way[2]), ("over", ended)):
            prompt = [*PROMPTS[2], *first.token_ids]
            turns.append((prompt, await client.generate(prompt, LONG, session=session)))
        return under_way, later, prefilled, turns

    under_way, later, prefilled, turns = asyncio.run(run())
    assert prefilled == len(PROMPTS[0]) - 1  # of what began later, once for both
    for prompt, found in zip(PROMPTS, under_way, strict=True):
        (begin, old), (moved, new) = found.versions
        assert (begin, old, new) == (0, 0, 1)
        assert 0 < moved < 24
        parts = [(before, moved), (model, 24 - moved)]
        assert found.logprobs == pytest.approx(by_parts(parts, prompt, found.token_ids, 0.7), abs=1e-4)
        fresh = by_parts([(model, 24)], prompt, found.token_ids, 0.7)
        assert found.logprobs[moved + 1 :] != pytest.approx(fresh[moved + 1 :], abs=1e-3)
    for prompt, found in [*((PROMPTS[0], answer) for answer in later), *turns]:
        assert found.versions == ()
        assert found.version == 1
        expected = by_parts([(model, 24)], prompt, found.token_ids, 0.7)
        assert found.logprobs == pytest.approx(expected, abs=1e-4)


def test_one_request_continues_through_several_updates(build, tokenizer):
    model = build("llama3")
    client, states = LocalClient(model, tokenizer), []

    async def run():
        await client.load(WeightRef(0))
        task = asyncio.create_task(client.generate(PROMPTS[0], LONG))
        for version in (1, 2, 3):
            await steps(5)
            states.append(copy.deepcopy(model))
            change(model)
            await client.load(WeightRef(version), keep_cache=True)
        return await task

    found = asyncio.run(run())
    assert [version for _, version in found.versions] == [0, 1, 2, 3]
    starts = [start for start, _ in found.versions]
    counts = [end - start for start, end in zip(starts, [*starts[1:], 24], strict=True)]
    parts = list(zip([*states, model], counts, strict=True))
    assert found.logprobs == pytest.approx(by_parts(parts, PROMPTS[0], found.token_ids, 0.7), abs=1e-4)
