"""Answer a sampling request: completions, and the log-probs of the prompt that it asks for."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import Count, NonNegative, Share
from rl4llm.core.types import Completion, SamplingParams
from rl4llm.extensions.tinker.messages import NO_LOGPROB, NOTHING, PromptScores, encode_samples, read
from rl4llm.extensions.tinker.models import ModelSampler, after_first, likeliest
from rl4llm.runtime.seeds import derive_seed

REFUSED = {
    "prompt_alt_tokens_k": "other tokens for a prompt's places",
    "record_stability_info": "what loss_fn='stable_reinforce' reads (set loss_fn=importance_sampling)",
}
NO_ROOM = Completion("", (), (), "length", 0)  # behind a prompt that fills the context


@dataclass(frozen=True, slots=True)
class GivenParams:
    """The `sampling_params` of a request, with the SDK's names and defaults. An empty list as `stop` never stops."""

    max_tokens: Count | None = None
    temperature: NonNegative = 1.0
    top_p: Share = 1.0
    top_k: int = -1
    stop: str | Sequence[str] | Sequence[int] | None = None
    seed: int | None = None


async def drawn(sampler_of: Callable[[], ModelSampler], body: Mapping[str, Any]) -> bytes:
    """Return the encoded answer of an `asample` request."""
    for key, what in REFUSED.items():
        if body.get(key):
            raise ConfigError(f"{key}={body[key]} is not available: {what}.")
    tokens = _tokens(body["prompt"])
    count, given = count_of(body), body.get("sampling_params") or {}
    sampler = sampler_of()
    room = sampler.client.context_length - len(tokens)
    params = params_of(given, room)
    _check_prompt(tokens, sampler, scored=bool(body.get("prompt_logprobs")) and params.max_tokens == 1)
    _check_counts(body, len(tokens), sampler.client.vocab_size)
    sampler.running += 1
    try:
        seeds = [derive_seed(params.seed, "sample", number) for number in range(count)]
        drawing = (sampler.client.generate(tokens, params.replace(seed=seed)) for seed in seeds)
        completions = await asyncio.gather(*drawing) if room else [NO_ROOM] * count
        prompt = _scores(sampler, tokens, body)
        top = body.get("topk_sample_logprobs") or 0
        likely: list[tuple[Tensor, Tensor] | None] = [None] * count
        if top:
            sequences = [[*tokens, *one.token_ids] for one in completions]
            places = [sampler.distributions(ids, params.temperature)[len(tokens) - 1 :] for ids in sequences]
            likely = [likeliest(rows, top) for rows in places]
        return encode_samples(completions, likely, prompt)
    finally:
        sampler.running -= 1


def count_of(body: Mapping[str, Any]) -> int:
    """Return how many samples a request asks for; raise ConfigError for anything but 1 or more."""
    count = 1 if body.get("num_samples") is None else body["num_samples"]
    if not (isinstance(count, int) and count > 0):
        raise ConfigError(f"num_samples={count!r} is not accepted. Accepted: 1 or above.")
    return count


def _check_prompt(tokens: list[int], sampler: ModelSampler, *, scored: bool) -> None:
    """Raise ConfigError for a prompt that the model cannot read; one that is only `scored` may fill the context."""
    most, vocabulary = sampler.client.context_length - (not scored), sampler.client.vocab_size
    if not 1 <= len(tokens) <= most:
        raise ConfigError(
            f"The prompt has {len(tokens)} tokens. Accepted: 1 to {most}. The context of "
            f"{sampler.client.context_length} tokens holds the completion too; compute_logprobs needs no room for one."
        )
    if wrong := [token for token in tokens if not (isinstance(token, int) and 0 <= token < vocabulary)]:
        raise ConfigError(f"The prompt has the token id {wrong[0]!r}. Accepted: 0 to {vocabulary - 1}.")


def _check_counts(body: Mapping[str, Any], length: int, vocabulary: int) -> None:
    ranges = {"topk_prompt_logprobs": (0, vocabulary), "topk_sample_logprobs": (0, vocabulary)}
    for key, (least, most) in {**ranges, "prompt_logprobs_last_n": (1, max(length, 1))}.items():
        given = body.get(key)
        if given is not None and not (isinstance(given, int) and least <= given <= most):
            raise ConfigError(f"{key}={given!r} is not accepted. Accepted: {least} to {most}.")


def params_of(given: Mapping[str, Any], room: int) -> SamplingParams:
    """Return the parameters of a request; without `max_tokens` a completion may fill the room that is left."""
    asked = read(GivenParams, given, "sampling_params")
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or ()
    return SamplingParams(
        max_tokens=asked.max_tokens or max(room, 1),
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(asked.top_k, 0),
        stop=tuple(item for item in stop if isinstance(item, str) and item),
        stop_token_ids=tuple(item for item in stop if isinstance(item, int)),
        seed=secrets.randbits(62) if asked.seed is None else asked.seed,
        ignore_eos=asked.stop is not None and not stop,
    )


def _tokens(prompt: Mapping[str, Any]) -> list[int]:
    found: list[int] = []
    for chunk in prompt["chunks"]:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise ConfigError(
                f"The prompt has a chunk of {chunk['type']!r}. This server's models read text alone."
            )
        found += chunk["tokens"]
    return found


def _scores(sampler: ModelSampler, tokens: list[int], body: Mapping[str, Any]) -> PromptScores:
    """Return what the request asks of its prompt, at temperature 1."""
    asked, top, targets = (
        body.get(key) for key in ("prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs")
    )
    if not (asked or top or targets):
        return PromptScores()
    logprobs_NV = (
        sampler.distributions(tokens).cpu() if len(tokens) > 1 else torch.zeros(0, sampler.client.vocab_size)
    )
    own_N = logprobs_NV.gather(1, torch.tensor(tokens[1:], dtype=torch.long)[:, None])[:, 0]
    left_out = len(tokens) - (body.get("prompt_logprobs_last_n") or len(tokens))
    own_N = after_first(own_N).index_fill(0, torch.arange(left_out), math.nan)
    likely = None
    if top:
        ids_NK, values_NK = likeliest(logprobs_NV, top)
        values_NK = after_first(values_NK, NO_LOGPROB).index_fill(0, torch.arange(left_out), NO_LOGPROB)
        likely = after_first(ids_NK, NOTHING).index_fill(0, torch.arange(left_out), NOTHING), values_NK
    return PromptScores(
        own_N if asked else None, likely, _of_targets(logprobs_NV, targets) if targets else None
    )


def _of_targets(logprobs_NV: Tensor, targets: Mapping[str, Any]) -> Tensor:
    """Return the log-probs (N, K) of the given tokens, NaN where a token is -1."""
    if targets.get("sparse_crow_indices") is not None:
        raise ConfigError("target_prompt_logprobs in a sparse form is not available. Next: send it dense.")
    tokens_NK = torch.tensor(targets["data"], dtype=torch.long).view(targets["shape"])
    if len(tokens_NK) != len(logprobs_NV) or tokens_NK.max() >= logprobs_NV.shape[1]:
        raise ConfigError(
            f"target_prompt_logprobs of shape {list(tokens_NK.shape)} is not accepted. Accepted: ids of the vocabulary in "
            f"{len(logprobs_NV)} rows, one for each token of the prompt after the first."
        )
    return logprobs_NV.gather(1, tokens_NK.clamp(min=0)).masked_fill(tokens_NK < 0, math.nan)
