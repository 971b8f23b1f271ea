"""Which of the two decoding paths serves a model, proven on the spot, and how long a context it can hold."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from rl4llm.core.errors import EngineError, unknown
from rl4llm.inference.kv_cache import KVCache, Window
from rl4llm.inference.llama_decode import LlamaDecoder, UnsupportedModelError
from rl4llm.inference.model_decode import ModelDecoder, evaluating

Path = Literal["auto", "fast", "model"]
PATHS = ("auto", "fast", "model")
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}  # of the logits' spread
TF32_TOLERANCE = 2e-2
FULL_ATTENTION = "full_attention"
WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


class Decoder(Protocol):
    """What the engine asks of a path: fill a cache, decode one token per row, and logits at every position.

    `reads_prefixes` says whether it can attend to a `SharedPrefix` in place; else each row holds a copy.
    """

    name: str
    reads_prefixes: bool
    num_layers: int

    def serves(self, model: Any) -> bool: ...

    def prefill(self, token_ids_BS: Tensor, cache: KVCache) -> None: ...

    def step(self, token_ids_B: Tensor, cache: KVCache) -> Tensor: ...

    def logits(self, token_ids_BS: Tensor, cache: KVCache) -> Tensor: ...


class Choice(NamedTuple):
    """The path taken and why."""

    decoder: Decoder
    reason: str


def choose_decoder(model: Any, path: Path, context_length: int) -> Choice:
    """The fastest path whose log-probs equal those of the model's own forward on a few random tokens.

    Raises EngineError when the asked path, or every path, fails.
    """
    if path not in PATHS:
        raise EngineError(unknown("path", str(path), PATHS))
    reason = "asked for"
    if path != "model":
        try:
            fast = LlamaDecoder(model)
            difference = prove(model, fast, context_length)
            return Choice(fast, f"log-probs equal the model's own forward to {difference:.1e}")
        except UnsupportedModelError as error:
            reason = f"the fast path does not fit: {error}"
            if path == "fast":
                raise EngineError(f"path='fast' is impossible: {error}. Use path='auto' or 'model'.") from error
    decoder = ModelDecoder(model)
    prove(model, decoder, context_length)
    return Choice(decoder, reason)


@torch.inference_mode()
def prove(model: Any, decoder: Decoder, context_length: int) -> float:
    """The largest difference in log-probs from the model's own forward; UnsupportedModelError beyond the tolerance.

    Two rows of unequal length go through all that the engine does: a padded prefill, an extension, single steps.
    """
    parameter = next(model.parameters())
    vocab_size = model.get_input_embeddings().num_embeddings
    long = max(2, min(14, context_length))
    lengths = [long, max(2, long - 5)]
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(vocab_size, (2, long), generator=generator).to(parameter.device)
    try:
        with evaluating(model):
            expected = [model(tokens_BT[row : row + 1, :length]).logits[0, -1] for row, length in enumerate(lengths)]
        found = _replay(decoder, KVCache(parameter.dtype, parameter.device), tokens_BT, lengths)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"the {decoder.name} path cannot run {type(model).__name__} with the engine's cache: {error}"
        ) from error
    expected_BV = torch.stack(expected).float().log_softmax(-1)
    difference = (found.float().log_softmax(-1) - expected_BV).abs().max().item()
    if not difference <= _tolerance(parameter) * expected_BV.std().item() + 1e-6:
        raise UnsupportedModelError(
            f"log-probs of the {decoder.name} path differ from the forward of {type(model).__name__} by {difference:.1e}"
        )
    return difference


def _tolerance(parameter: Tensor) -> float:
    if parameter.dtype == torch.float32 and parameter.device.type != "cpu":
        return TF32_TOLERANCE
    return TOLERANCE[parameter.dtype]


def _replay(decoder: Decoder, cache: KVCache, tokens_BT: Tensor, lengths: list[int]) -> Tensor:
    """Logits after the last token of each row."""
    cache.reserve(2, tokens_BT.shape[1])
    starts = [max(1, length // 2) - 1 for length in lengths]
    if max(starts) > 1:
        cache.window = Window(cache, 0, [0, 0], max(starts))
        decoder.prefill(tokens_BT[:, : max(starts)], cache)
    else:
        starts = [0, 0]
    for row in range(2):
        count = lengths[row] - 1 - starts[row]
        if count > 1:
            cache.window = Window(cache, row, [starts[row]], count)
            decoder.prefill(tokens_BT[row : row + 1, starts[row] : starts[row] + count], cache)
            starts[row] += count
    return _steps(decoder, cache, tokens_BT, starts, lengths)


def _steps(decoder: Decoder, cache: KVCache, tokens_BT: Tensor, starts: list[int], lengths: list[int]) -> Tensor:
    logits = [torch.empty(0)] * 2
    for _ in range(max(length - start for start, length in zip(starts, lengths, strict=True))):
        cache.window = Window(cache, 0, starts, 1)
        step_BV = decoder.step(torch.stack([tokens_BT[row, starts[row]] for row in range(2)]), cache)
        for row in range(2):
            if starts[row] == lengths[row] - 1:
                logits[row] = step_BV[row]
            starts[row] = min(starts[row] + 1, lengths[row] - 1)
    return torch.stack(logits)


def context_limit(model: Any, asked: int | None) -> tuple[int, str]:
    """How many tokens a conversation may hold, and what sets that; raises EngineError where `asked` cannot be had."""
    _check_kind(model)
    limits = _limits(model.config.get_text_config())
    if asked is not None:
        if asked < 2:
            raise EngineError(f"context_length={asked} is not accepted: at least 2 tokens.")
        limits.append((asked, "context_length"))
    if not limits:
        raise EngineError(f"{type(model).__name__} states no max_position_embeddings; give context_length.")
    length, reason = min(limits)
    if asked is not None and length < asked:
        raise EngineError(f"context_length={asked} is not accepted: {reason} of the model allows {length}.")
    return length, reason


def _check_kind(model: Any) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {FULL_ATTENTION, *WINDOWED}
    name = type(model).__name__
    if getattr(model, "_is_stateful", False) or kinds:
        found = ", ".join(sorted(kinds)) or "recurrent state"
        raise EngineError(f"{name} keeps {found}, which the embedded engine cannot cache. Use another model or engine.")
    if model.config.is_encoder_decoder:
        raise EngineError(f"{name} is an encoder-decoder; the embedded engine serves causal language models.")


def _limits(config: Any) -> list[tuple[int, str]]:
    """Lengths beyond which the model would not be computed right by a plain causal cache."""
    limits = [(getattr(config, "max_position_embeddings", None), "max_position_embeddings")]
    kinds = getattr(config, "layer_types", None)
    for kind, key in WINDOWED.items():
        if kinds is None or kind in kinds:
            limits.append((getattr(config, key, None), key))
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") == "longrope":
        limits.append((rope.get("original_max_position_embeddings"), "original_max_position_embeddings"))
    return [(length, reason) for length, reason in limits if length]
