"""Generation alone: the embedded engine against `model.generate`, the same model, prompts, lengths, threads and kernels.

    python scripts/bench/generation.py --size 1m
    python scripts/bench/generation.py --size 30m --dtype bfloat16 --pairs 7
    python scripts/bench/generation.py --model SMOLLM2 --prompts 4 --dtype autocast --peer-dtype bfloat16 --path fast

16 prompts x 8 samples x 64 new tokens of forced length, temperature 1. Both sides run in one process in alternation;
the ratio is the median over the pairs of (generate's time / the engine's time). `autocast` is bfloat16 products with
float32 weights.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from models import (
    PROMPT_TOKENS,
    SHAPES,
    build_model,
    build_prompts,
    build_tokenizer,
    describe_machine,
    load_model,
)
from peer import in_turns, parser_of, ratios

from rl4llm.core.types import SamplingParams
from rl4llm.inference.local import LocalClient
from rl4llm.runtime.cpu import prefers_onednn, use_fast_linear

SAMPLES, NEW_TOKENS = 8, 64
DTYPES = ("float32", "bfloat16", "autocast")


def generate_side(model: torch.nn.Module, prompts: list[list[int]], dtype: str) -> Callable[[int], int]:
    """`model.generate` at its best settings: one batch, equal lengths, dynamic cache, no logits kept."""
    tokens_BT = torch.tensor([prompt for prompt in prompts for _ in range(SAMPLES)])

    @torch.inference_mode()
    def run(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            output = model.generate(
                tokens_BT,
                attention_mask=torch.ones_like(tokens_BT),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
        return output[:, PROMPT_TOKENS:].numel()

    return run


def engine_side(client: LocalClient, prompts: list[list[int]]) -> Callable[[int], int]:
    """The embedded engine on the same prompts; unlike the other side it also returns log-probs and text."""
    requests = [prompt for prompt in prompts for _ in range(SAMPLES)]

    def run(seed: int) -> int:
        params = [
            SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=seed * 1000 + number)
            for number in range(len(requests))
        ]
        return sum(len(completion.token_ids) for completion in client.generate_batch(requests, params))

    return run


def speed(run: Callable[[int], int], rounds: itertools.count[int], tokens: int) -> float:
    """Tokens per second."""
    start = time.perf_counter()
    found = run(next(rounds))
    elapsed = time.perf_counter() - start
    if found != tokens:
        raise SystemExit(f"expected {tokens} tokens, got {found}")
    return tokens / elapsed


def compare(options: argparse.Namespace, path: str) -> str:
    model, tokenizer, prompts = subject(options)
    model = model.to(weights_of(options.dtype))
    peer = model
    if weights_of(options.peer_dtype) != model.dtype:
        peer = copy.deepcopy(model).to(weights_of(options.peer_dtype))
    use_fast_linear(model)
    use_fast_linear(peer)
    autocast = "bfloat16" if options.dtype == "autocast" else "none"
    client = LocalClient(model, tokenizer, path=path, autocast=autocast)
    sides = {
        "theirs": generate_side(peer, prompts, options.peer_dtype),
        "ours": engine_side(client, prompts),
    }
    tokens = len(prompts) * SAMPLES * NEW_TOKENS
    runs = {name: partial(speed, run, itertools.count(), tokens) for name, run in sides.items()}
    speeds = in_turns(runs, options.pairs)
    pairs = ratios(speeds["ours"], speeds["theirs"])
    return (
        f"{options.dtype:>9} {options.peer_dtype:>9} {path:>6} {statistics.median(speeds['theirs']):>11,.0f} "
        f"{statistics.median(speeds['ours']):>11,.0f} {statistics.median(pairs):>7.2f} {min(pairs):>6.2f} - {max(pairs):.2f}"
    )


def subject(options: argparse.Namespace) -> tuple[Any, Any, list[list[int]]]:
    """Return the model in float32, its tokenizer, and prompts."""
    if options.model:
        model, tokenizer = load_model(options.model)
        return model, tokenizer, build_prompts(model.config.vocab_size, options.prompts)
    prompts = build_prompts(SHAPES[options.size]["vocab_size"], options.prompts)
    return build_model(options.size), build_tokenizer(options.size), prompts


def weights_of(dtype: str) -> torch.dtype:
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="1m")
    parser.add_argument("--model", help="the directory of a pretrained model, instead of --size")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--peer-dtype", choices=DTYPES, help="generate's, by default --dtype")
    parser.add_argument(
        "--path", choices=["fast", "model", "both"], default="both", help="the engine's decoding path"
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.peer_dtype = options.peer_dtype or options.dtype
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    print(
        f"{options.model or options.size}: {options.prompts} prompts x {SAMPLES} samples x {NEW_TOKENS} tokens"
    )
    print(f"{options.pairs} pairs; {describe_machine()}")
    if not prefers_onednn():
        print("oneDNN is not preferred on this machine: both sides use torch's own linear.")
    print("    dtype generate's   path generate/s    engine/s   ratio  range")
    for path in ("fast", "model") if options.path == "both" else (options.path,):
        print(compare(options, path), flush=True)


if __name__ == "__main__":
    main()
