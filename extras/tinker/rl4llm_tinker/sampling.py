"""Answer a sampling request: completions, and the log-probs of the prompt that it asks for."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import Count, Natural, NonNegative, Share
from rl4llm.core.types import Completion, SamplingParams
from rl4llm.envs.wire import MOST_STOPS
from rl4llm.runtime.seeds import derive_seed
from rl4llm_tinker.messages import NO_LOGPROB, NOTHING, PromptScores, encode_samples
from rl4llm_tinker.models import ModelSampler, after_first, likeliest
from rl4llm_tinker.requests import Likely, Samples, call

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


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What an `asample` request asks for, with the SDK's names and defaults."""

    prompt: dict[str, Any]
    num_samples: Samples = 1
    sampling_params: dict[str, Any] = field(default_factory=dict)
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: Natural | None = None
    topk_prompt_logprobs: Likely = 0
    topk_sample_logprobs: Likely = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool = False


async def drawn(sampler_of: Callable[[], ModelSampler], asked: SampleRequest) -> bytes:
    """Return the encoded answer of an `asample` request."""
    for key, what in REFUSED.items():
        if value := getattr(asked, key):
            raise ConfigError(f"{key}={value} is not available: {what}.")
    tokens, count = _tokens(asked.prompt), asked.num_samples
    sampler = sampler_of()
    room = sampler.client.context_length - len(tokens)
    params = params_of(asked.sampling_params, room)
    _check_prompt(tokens, sampler, scored=asked.prompt_logprobs and params.max_tokens == 1)
    if (last := asked.prompt_logprobs_last_n) is not None and not 1 <= last <= len(tokens):
        raise ConfigError(f"prompt_logprobs_last_n={last} is not accepted. Accepted: 1 to {len(tokens)}.")
    sampler.running += 1
    try:
        seeds = [derive_seed(params.seed, "sample", number) for number in range(count)]
        drawing = (sampler.client.generate(tokens, params.replace(seed=seed)) for seed in seeds)
        completions = await asyncio.gather(*drawing) if room else [NO_ROOM] * count
        prompt = _scores(sampler, tokens, asked)
        likely: list[tuple[Tensor, Tensor] | None] = [None] * count
        if top := asked.topk_sample_logprobs:
            for number, one in enumerate(completions):
                rows = sampler.distributions([*tokens, *one.token_ids], params.temperature)
                likely[number] = likeliest(rows[len(tokens) - 1 :], top)
        return encode_samples(completions, likely, prompt)
    finally:
        sampler.running -= 1


def _check_prompt(tokens: list[int], sampler: ModelSampler, *, scored: bool) -> None:
    """Raise ConfigError for a prompt that the model cannot read; one that is only `scored` may fill the context."""
    most, vocabulary = sampler.client.context_length - (not scored), sampler.client.vocab_size
    if not 1 <= len(tokens) <= most:
        raise ConfigError(
            f"The prompt has {len(tokens)} tokens. Accepted: 1 to {most}. The context of "
            f"{sampler.client.context_length} tokens holds the completion too; compute_logprobs needs no room for one."
        )
    if wrong := [token for token in tokens if not _is_token(token, vocabulary)]:
        raise ConfigError(f"The prompt has the token id {wrong[0]!r:.80}. Accepted: 0 to {vocabulary - 1}.")


def _is_token(token: Any, vocabulary: int, least: int = 0) -> bool:
    return type(token) is int and least <= token < vocabulary


def params_of(given: dict[str, Any], room: int) -> SamplingParams:
    """Return the parameters of a request; without `max_tokens` a completion may fill the room that is left."""
    asked = call(GivenParams, given, "sampling_params")
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or ()
    if len(stop) > MOST_STOPS:
        raise ConfigError(f"sampling_params.stop has {len(stop)} items. Accepted: at most {MOST_STOPS}.")
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


def _tokens(prompt: dict[str, Any]) -> list[Any]:
    """Return the tokens of a prompt; `_check_prompt` reads them when it knows how many there are."""
    tokens: list[Any] = []
    for chunk in chunks if isinstance(chunks := prompt.get("chunks"), list) else ():
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else chunk
        if kind != "encoded_text" or not isinstance(chunk, dict):
            raise ConfigError(
                f"The prompt has a chunk of {kind!r:.80}. This server's models read text alone."
            )
        tokens += ids if isinstance(ids := chunk.get("tokens"), list) else [f"{ids}"]
    return tokens


def _scores(sampler: ModelSampler, tokens: list[int], asked: SampleRequest) -> PromptScores:
    """Return what the request asks of its prompt, at temperature 1."""
    top, targets = asked.topk_prompt_logprobs, asked.target_prompt_logprobs
    if not (asked.prompt_logprobs or top or targets):
        return PromptScores()
    logprobs_NV = (
        sampler.distributions(tokens).cpu() if len(tokens) > 1 else torch.zeros(0, sampler.client.vocab_size)
    )
    own_N = logprobs_NV.gather(1, torch.tensor(tokens[1:], dtype=torch.long)[:, None])[:, 0]
    left_out = len(tokens) - (asked.prompt_logprobs_last_n or len(tokens))
    own_N = after_first(own_N).index_fill(0, torch.arange(left_out), math.nan)
    likely = None
    if top:
        ids_NK, values_NK = likeliest(logprobs_NV, top)
        values_NK = after_first(values_NK, NO_LOGPROB).index_fill(0, torch.arange(left_out), NO_LOGPROB)
        likely = after_first(ids_NK, NOTHING).index_fill(0, torch.arange(left_out), NOTHING), values_NK
    scored = _of_targets(logprobs_NV, targets) if targets else None
    return PromptScores(own_N if asked.prompt_logprobs else None, likely, scored)


def _of_targets(logprobs_NV: Tensor, targets: dict[str, Any]) -> Tensor:
    """Return the log-probs (N, K) of the given tokens, NaN where a token is -1."""
    if targets.get("sparse_crow_indices") is not None:
        raise ConfigError("target_prompt_logprobs in a sparse form is not available. Next: send it dense.")
    (length, vocabulary), shape, data = logprobs_NV.shape, targets.get("shape"), targets.get("data")
    ids: list[int] = data if isinstance(data, list) else [vocabulary]
    each = len(ids) // max(length, 1)
    if shape != [length, each] or not all(_is_token(one, vocabulary, -1) for one in ids):
        raise ConfigError(
            f"target_prompt_logprobs of shape {shape!r:.80} is not accepted. Accepted: ids of the vocabulary in {length} "
            "rows, one for each token of the prompt after the first."
        )
    tokens_NK = torch.tensor(ids, dtype=torch.long).view(length, each)
    return logprobs_NV.gather(1, tokens_NK.clamp(min=0)).masked_fill(tokens_NK < 0, math.nan)
