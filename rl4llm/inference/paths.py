"""Choose the decoding path of a model, after comparing log-probs, and the length of its context."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rl4llm.core.errors import EngineError
from rl4llm.core.images import tower_of
from rl4llm.core.registry import load
from rl4llm.data.lengths import context_limits
from rl4llm.inference.embedded.kv_cache import KVCache, Window
from rl4llm.inference.embedded.llama_decode import LlamaDecoder, UnsupportedModelError
from rl4llm.inference.embedded.model_decode import Layers, ModelDecoder, autocasting, evaluating
from rl4llm.inference.embedded.precision import in_float32
from rl4llm.inference.embedded.rows import Decoder
from rl4llm.runtime.devices import has_graphs

Path = Literal["auto", "fast", "graph", "model"]
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # of the logits' spread
TF32_TOLERANCE = 2e-2
STEPS = 3  # single steps of the proof: a captured one, and replays of it
FARTHER = 1.5  # times as far from float32 as the model's own forward, on average over the vocabulary


class Choice(NamedTuple):
    """The chosen path, and why."""

    decoder: Decoder
    reason: str


class Agreement(NamedTuple):
    """How far the log-probs of a path are from the model's own forward; in a narrow dtype both from float32, on average."""

    difference: float
    own: float | None = None

    def __str__(self) -> str:
        if self.own is None:
            return f"log-probs equal the model's own forward to {self.difference:.1e}"
        return f"log-probs differ from float32 by {self.difference:.1e} on average, its own forward by {self.own:.1e}"


def choose_decoder(
    model: Any, path: Path, context_length: int, autocast: torch.dtype | None = None
) -> Choice:
    """Return the fastest path whose log-probs are those of the model's own forward on a few random tokens.

    The path "graph" is the fast one with steps in a fixed shape, which are CUDA graphs where there is a GPU. There "auto" is
    "graph".
    Raises EngineError when the requested path, or every path, fails.
    """
    reason = "requested"
    if path != "model" and tower_of(model) is not None:
        path, reason = "model", "only the model's own forward computes images"
    if path != "model":
        try:
            kind = LlamaDecoder
            if path == "graph" or (path == "auto" and has_graphs(next(model.parameters()).device)):
                kind = load("rl4llm.inference.embedded.static_decode:StaticDecoder")
            fast = kind(model, context_length, autocast)
            fast.refresh()
            return Choice(fast, str(prove(model, fast, context_length, autocast)))
        except UnsupportedModelError as error:
            reason = f"the fast path does not fit, since {error}"
            if path != "auto":
                raise EngineError(
                    f"path={path!r} is impossible: {error}. Use path='auto' or 'model'."
                ) from error
    decoder = ModelDecoder(model, autocast)
    prove(model, decoder, context_length, autocast)
    if decoder.recurrent and reason != "requested":
        reason += ". Its layers are recurrent: prompts of unequal length are computed one after another, and a conversation "
        reason += "that does not continue all its earlier tokens is computed again from its start"
    return Choice(decoder, reason)


@torch.inference_mode()
def prove(
    model: Any, decoder: Decoder, context_length: int, autocast: torch.dtype | None = None
) -> Agreement:
    """Return how well the log-probs of a path agree with those of the model's own forward.

    Two rows of unequal length go through everything that the engine does: a padded prefill, an extension, single steps. A
    step that was captured is replayed on other tokens, at other positions.
    In float32 both must be equal. In a narrower dtype both are rounded, and the path may not be much farther from float32.
    Raises UnsupportedModelError if the path cannot run the model, or disagrees.
    """
    parameter = next(model.parameters())
    dtype, device = autocast or parameter.dtype, parameter.device
    vocab_size = model.get_input_embeddings().num_embeddings
    long = max(2, min(14, context_length))
    lengths = [long, max(2, long - 5)]
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(vocab_size, (2, long), generator=generator).to(device)
    name, kind = f"the {decoder.name} path", type(model).__name__
    try:
        found_BV = _logprobs(_replay(decoder, decoder.cache(dtype, device), tokens_BT, lengths))
        with evaluating(model), autocasting(device, autocast):
            own_BV = _forward(model, tokens_BT, lengths)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"{name} cannot run {kind} with the engine's cache: {error}") from error
    if dtype not in TOLERANCE:
        with evaluating(model), in_float32(model), autocasting(device, None):
            exact_BV = _forward(model, tokens_BT, lengths)
        path_error, forward_error = ((x_BV - exact_BV).abs().mean().item() for x_BV in (found_BV, own_BV))
        agreement = Agreement(path_error, forward_error)
        if not path_error <= FARTHER * forward_error + 1e-6:
            raise UnsupportedModelError(f"{name} computes {kind} worse than its own forward: {agreement}")
        return agreement
    difference = (found_BV - own_BV).abs().max().item()
    on_tensor_cores = dtype == torch.float32 and device.type != "cpu"
    tolerance = TF32_TOLERANCE if on_tensor_cores else TOLERANCE[dtype]
    if not difference <= tolerance * own_BV.std().item() + 1e-6:
        raise UnsupportedModelError(
            f"log-probs of {name} differ from the forward of {kind} by {difference:.1e}"
        )
    return Agreement(difference)


def _forward(model: Any, tokens_BT: Tensor, lengths: list[int]) -> Tensor:
    rows = enumerate(lengths)
    return _logprobs(torch.stack([model(tokens_BT[row : row + 1, :end]).logits[0, -1] for row, end in rows]))


def _logprobs(logits_BV: Tensor) -> Tensor:
    return logits_BV.float().log_softmax(-1)


def _replay(decoder: Decoder, cache: KVCache, tokens_BT: Tensor, lengths: list[int]) -> Tensor:
    cache.reserve(2, tokens_BT.shape[1])
    starts = [max(1, length // 2) - 1 for length in lengths]
    if max(starts) > 1:
        count = max(starts)
        cache.window = Window(cache, 0, [0, 0], count)
        decoder.prefill(tokens_BT[:, :count], cache)
        starts = [count, count] if decoder.recurrent else starts
    else:
        starts = [0, 0]
    for row in range(2):
        count = lengths[row] - STEPS - starts[row]
        if count > 1:
            cache.window = Window(cache, row, [starts[row]], count)
            decoder.prefill(tokens_BT[row : row + 1, starts[row] : starts[row] + count], cache)
            starts[row] += count
    logits: dict[int, Tensor] = {}
    for _ in range(max(length - start for start, length in zip(starts, lengths, strict=True))):
        cache.window = Window(cache, 0, starts, 1)
        step_BV = decoder.step(torch.stack([tokens_BT[row, starts[row]] for row in range(2)]), cache)
        for row in range(2):
            if starts[row] == lengths[row] - 1:
                logits.setdefault(row, step_BV[row])
            starts[row] = min(starts[row] + 1, lengths[row] - 1)
    return torch.stack([logits[0], logits[1]])


def context_limit(model: Any, asked: int | None) -> tuple[int, str]:
    """Return how many tokens a conversation may have, and what limits it; raise EngineError if `asked` is too long."""
    Layers(model)  # raises if one cannot be cached
    limits = context_limits(model.config) + ([] if asked is None else [(asked, "context_length")])
    length, reason = min(limits, default=(0, "max_position_embeddings (none)"))
    if length < (asked or 1):
        raise EngineError(f"context_length={asked} is not accepted: {reason} of the model allows {length}.")
    return length, reason
