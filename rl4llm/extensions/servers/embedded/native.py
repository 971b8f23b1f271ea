"""The server's native requests, in the form of SGLang's `/generate`, so that the same client and fleet use both."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl4llm.core.errors import ConfigError, EngineError, unknown
from rl4llm.core.schema import with_options
from rl4llm.core.types import Completion, SamplingParams
from rl4llm.envs.wire import RequestError, stops_of

FIELDS = (
    "rid", "input_ids", "images", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "extra_key",  # names a part of a prefix cache; here no cache outlives its request
)  # fmt: skip
ADDED = {
    "model": None, "return_text_in_logprobs": False, "log_metrics": True, "return_hidden_states": False,
    "background": False, "stream": False, "no_logs": False, "return_bytes": False, "return_entropy": False,
}  # fmt: skip
"""What clients and SGLang's router add to requests, which asks for nothing."""
SAMPLED = {
    "max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "stop": "stop",
    "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos", "sampling_seed": "seed", "ebnf": "grammar",
}  # fmt: skip
"""Sampling parameters by their name in requests."""
MOST_TOP = 1024  # most probable tokens at each place of a request
NEUTRAL = {"min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
"""What the engine does not have; requests may send only these values."""


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """A request for a completion of tokens, or with `scores` for the log-probs of the tokens themselves.

    `top` is the number of the most probable tokens that are scored at each place too. `images` is how the request gives its
    images, see `rl4llm.extensions.servers.embedded.images`.
    """

    id: str
    token_ids: list[int]
    params: SamplingParams
    scores: bool
    images: Any = None
    top: int = 0


def read_native(body: Any) -> NativeRequest:
    """Check a request's JSON. Raises RequestError."""
    options = object_of(object_of(body).get("sampling_params", {}))
    for fields, names, neutral in ((body, FIELDS, ADDED), (options, SAMPLED, NEUTRAL)):
        for name, value in fields.items():
            if name not in names and (name not in neutral or value != neutral[name]):
                only = f"{name}={value!r:.100} is not accepted. Accepted: {neutral.get(name)!r}."
                raise RequestError(only if name in neutral else unknown("field", name, names), param=name)
    params = sampling_params({option: options[name] for name, option in SAMPLED.items() if name in options})
    (top,) = tokens_of([body.get("top_logprobs_num", 0)], "top_logprobs_num")
    if not 0 <= top <= MOST_TOP:
        raise RequestError(
            f"top_logprobs_num={top} is not accepted. Accepted: 0 to {MOST_TOP}.", param="top_logprobs_num"
        )
    rid = body.get("rid")
    return NativeRequest(
        rid if isinstance(rid, str) and rid else secrets.token_hex(8),
        tokens_of(body.get("input_ids"), "input_ids"),
        params,
        "logprob_start_len" in body,
        body.get("images"),
        top,
    )


def object_of(body: Any) -> Mapping[str, Any]:
    """Return JSON that is an object; raise RequestError if it is not."""
    if not isinstance(body, dict):
        raise RequestError(f"{body!r:.100} must be a JSON object.")
    return body


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Check values and make sampling parameters of them, by default with a random seed. Raises RequestError."""
    values = {
        "seed": secrets.randbits(63),
        **options,
        "stop": stops_of(options, "stop"),
        "stop_token_ids": tuple(tokens_of(options.get("stop_token_ids", []), "stop_token_ids")),
    }
    if values.get("top_k") == -1:  # off, too
        values["top_k"] = 0
    try:
        return with_options("sampling_params", SamplingParams, values)
    except (ConfigError, EngineError) as error:
        raise RequestError(str(error)) from error


def tokens_of(ids: Any, name: str) -> list[int]:
    """Return token ids; raise RequestError for anything else than a list of whole numbers."""
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RequestError(f"{name} must be a list of token ids: {ids!r:.100}.", param=name)
    return list(ids)


def version_text(version: int) -> str:
    """Return a version as clients expect it; before the first load it is "default"."""
    return "default" if version < 0 else str(version)


def completion_body(asked: NativeRequest, completion: Completion) -> dict[str, Any]:
    """Return the JSON of a completion: exactly what was sampled, and the version of the weights of each run of tokens."""
    meta = {
        "id": asked.id,
        "finish_reason": {"type": completion.finish_reason},
        "prompt_tokens": len(asked.token_ids),
        "completion_tokens": len(completion.token_ids),
        "weight_version": version_text(completion.version),
        "weight_versions": [
            {"version": version_text(version), "start": start, "end": end}
            for start, end, version in completion.runs
        ],
        "output_token_logprobs": [
            [logprob, token, None]
            for logprob, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ],
    }
    return {
        "text": completion.text,
        "output_ids": list(completion.token_ids),
        "meta_info": meta | _digests(asked),
    }


def scores_body(
    asked: NativeRequest, scores: list[float], tops: list[list[tuple[float, int]]], version: int
) -> dict[str, Any]:
    """Return the JSON of the log-probs of the request's tokens."""
    rows = [[score, token, None] for score, token in zip([None, *scores], asked.token_ids, strict=True)]
    best = [None, *([[*pair, None] for pair in pairs] for pairs in tops)] if asked.top else []
    meta = {"id": asked.id, "finish_reason": {"type": "length"}, "weight_version": version_text(version)}
    return {
        "text": "",
        "output_ids": [],
        "meta_info": {**meta, "input_token_logprobs": rows, "input_top_logprobs": best, **_digests(asked)},
    }


def _digests(asked: NativeRequest) -> dict[str, Any]:
    """Return the digests of the images of a request, which what is between client and server may have left out."""
    return {"images": [item["digest"] for item in asked.images]} if asked.images else {}
