"""Images in the embedded engine: its log-probs are those of the family's own forward, whatever its caches hold."""

import asyncio
from dataclasses import replace

import pytest
import torch
from vision_models import plain_logprobs, seeing_model, whole_model

from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.core.errors import RefusedError
from rl4llm.core.images import ImagePlace, moved
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.inference.local import LocalClient

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def parts(seen):
    """Return an engine, the whole model, the family's facts and the context spans of the trajectories."""
    directory, vision, trajectories = seen
    client = LocalClient(seeing_model(directory, vision), load_tokenizer(directory), path="auto")
    asyncio.run(client.load(WeightRef(0)))
    contexts = [[span for span in one.spans if span.author == "context"] for one in trajectories]
    return client, whole_model(directory), vision, contexts


@torch.no_grad()
def apart(whole, vision, prompt, images, completion):
    expected = plain_logprobs(whole, vision, [*prompt, *completion.token_ids], images)[len(prompt) - 1 :]
    return float((torch.tensor(completion.logprobs) - expected).abs().max())


def other_image(vision, place):
    return replace(place, image=vision.store.add(255 - vision.store.pixels(place.image)))


def test_groups_and_text_together_have_the_familys_logprobs(parts):
    client, whole, vision, contexts = parts
    asked = [contexts[0][0]] * 3 + [contexts[2][0]] * 2 + [contexts[4][0]] * 2  # the last are text

    async def sample():
        every = (
            client.generate(span.token_ids, PARAMS.replace(seed=seed), images=span.images)
            for seed, span in enumerate(asked)
        )
        return await asyncio.gather(*every)

    for span, completion in zip(asked, asyncio.run(sample()), strict=True):
        assert apart(whole, vision, span.token_ids, span.images, completion) < 1e-5
    computed = asyncio.run(client.health())
    assert computed["path"] == "model" and "images" in computed["path_reason"]
    assert computed["reused_tokens"] > 0  # prompts of groups


def test_turns_of_a_session_bring_more_images(parts):
    client, whole, vision, contexts = parts
    first, second = contexts[0]

    async def play():
        prompt, images = [*first.token_ids], first.images
        for turn in (first, second, second):
            if turn is not first:
                images = (*images, *moved(turn.images, len(prompt)))
                prompt += turn.token_ids
            completion = await client.generate(prompt, PARAMS, session="s", images=images)
            assert apart(whole, vision, prompt, images, completion) < 1e-5
            prompt += completion.token_ids
        return (await client.health())["reused_tokens"]

    assert asyncio.run(play()) > len(first.token_ids)


def test_a_sampled_placeholder_is_a_token_in_the_next_turn(parts):
    client, whole, vision, contexts = parts
    first, second = contexts[0]
    prompt = [*first.token_ids, 7, vision.placeholder, 8]
    images = (*first.images, *moved(second.images, len(prompt)))
    prompt += second.token_ids
    completion = asyncio.run(client.generate(prompt, PARAMS, images=images))
    assert apart(whole, vision, prompt, images, completion) < 1e-5


@pytest.mark.parametrize("session", ["s", ""], ids=["session", "group"])
def test_caches_tell_images_apart(parts, session):
    client, whole, vision, contexts = parts
    span = contexts[2][0]
    other = tuple(other_image(vision, place) for place in span.images)

    async def sample():
        if session:
            ask = [
                await client.generate(span.token_ids, PARAMS, session="s", images=found)
                for found in (span.images, other)
            ]
            return list(zip((span.images, other), ask, strict=True))
        every = (span.images, other, span.images, other)
        found = (client.generate(span.token_ids, PARAMS, images=images) for images in every)
        return list(zip(every, await asyncio.gather(*found), strict=True))

    for images, completion in asyncio.run(sample()):
        assert apart(whole, vision, span.token_ids, images, completion) < 1e-5


def test_requests_with_images_restart_with_new_weights(parts):
    client, whole, vision, contexts = parts
    span = contexts[0][0]

    async def sample():
        running = asyncio.ensure_future(client.generate(span.token_ids, PARAMS, images=span.images))
        while not client._futures or len(client.sampled("")) < 2:
            await asyncio.sleep(0)
        await client.load(WeightRef(1))
        return await running

    completion = asyncio.run(sample())
    assert len(completion.versions) == 2
    assert apart(whole, vision, span.token_ids, span.images, completion) < 1e-5


@torch.no_grad()
def test_scores_are_the_familys(parts):
    client, whole, vision, contexts = parts
    span = contexts[0][0]
    expected = plain_logprobs(whole, vision, span.token_ids, span.images)
    found = torch.tensor(asyncio.run(client.score(span.token_ids, span.images)))
    assert (found - expected).abs().max() < 1e-5


def test_places_that_cannot_be_are_refused(parts, seen):
    client, _, _, contexts = parts
    directory, *_ = seen
    span = contexts[2][0]
    (place,) = span.images
    wrong = {
        "too long": replace(place, length=place.length + 1),
        "at the end": ImagePlace(place.image, len(span.token_ids) - place.length, place.length),
    }
    for what in wrong.values():
        with pytest.raises(RefusedError):
            asyncio.run(client.generate(span.token_ids, PARAMS, images=[what]))
    with pytest.raises(RefusedError):
        asyncio.run(client.generate(span.token_ids, PARAMS, images=[place, place]))
    blind = LocalClient(load_model(directory, device="cpu"), load_tokenizer(directory))
    with pytest.raises(RefusedError):
        asyncio.run(blind.generate(span.token_ids, PARAMS, images=span.images))
