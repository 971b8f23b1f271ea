"""Generation alone: the embedded engine against `model.generate`, the same model, prompts, lengths, threads and kernels.

    python scripts/bench/generation.py --size 1m
    python scripts/bench/generation.py --size 30m --dtype bfloat16 --pairs 7

16 prompts x 8 samples x 64 new tokens of forced length, temperature 1. Both sides run in one process in alternation;
the ratio is the median over the pairs of (generate's time / the engine's time).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from models import PROMPT_TOKENS, SHAPES, build_model, build_prompts, build_tokenizer

import rl4llm.core.kernels
from rl4llm.core.kernels import prefers_onednn, use_fast_linear
from rl4llm.core.types import SamplingParams
from rl4llm.inference.local import LocalClient

PROMPTS, SAMPLES, NEW_TOKENS = 16, 8, 64


def generate_side(model: torch.nn.Module, prompts: list[list[int]]) -> Callable[[int], int]:
    """`model.generate` at its best settings: one batch, equal lengths, dynamic cache, no logits kept."""
    tokens_BT = torch.tensor([prompt for prompt in prompts for _ in range(SAMPLES)])

    @torch.inference_mode()
    def run(seed: int) -> int:
        torch.manual_seed(seed)
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


def measure(sides: list[Callable[[int], int]], pairs: int) -> list[list[float]]:
    """Tokens per second of each side in each pair, A B A B ..., after one round to warm up."""
    speeds: list[list[float]] = [[] for _ in sides]
    for pair in range(pairs + 1):
        for side, run in enumerate(sides):
            start = time.perf_counter()
            tokens = run(pair)
            elapsed = time.perf_counter() - start
            if tokens != PROMPTS * SAMPLES * NEW_TOKENS:
                raise SystemExit(f"expected {PROMPTS * SAMPLES * NEW_TOKENS} tokens, got {tokens}")
            if pair:
                speeds[side].append(tokens / elapsed)
    return speeds


def compare(options: argparse.Namespace, path: str, kernels: str) -> str:
    model = build_model(options.size, getattr(torch, options.dtype))
    if kernels == "onednn":
        use_fast_linear(model)
    else:  # the engine asks on every product; without this it would use oneDNN whatever the model's layers are
        rl4llm.core.kernels.prefers_onednn = lambda: False
    client = LocalClient(model, build_tokenizer(options.size), path=path)
    prompts = build_prompts(options.size, PROMPTS)
    theirs, ours = measure([generate_side(model, prompts), engine_side(client, prompts)], options.pairs)
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return (
        f"{options.size:>4} {options.dtype:>9} {kernels:>7} {path:>6} {statistics.median(theirs):>11,.0f} "
        f"{statistics.median(ours):>11,.0f} {statistics.median(ratios):>7.2f} {min(ratios):>6.2f} - {max(ratios):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SHAPES), default="1m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--path", choices=["fast", "model", "both"], default="both", help="the engine's decoding path")
    parser.add_argument("--kernels", choices=["onednn", "stock", "both"], default="onednn", help="linear layers, both sides")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    paths = ["fast", "model"] if options.path == "both" else [options.path]
    kinds = ["onednn", "stock"] if options.kernels == "both" else [options.kernels]
    print(f"{PROMPTS} prompts x {SAMPLES} samples x {NEW_TOKENS} tokens, {options.threads} threads, {options.pairs} pairs")
    if "onednn" in kinds and not prefers_onednn():
        print("oneDNN is not preferred on this machine: both sides use torch's own linear.")
    print("size     dtype kernels   path generate/s    engine/s   ratio  range")
    for kernels in kinds:
        for path in paths:
            print(compare(options, path, kernels), flush=True)


if __name__ == "__main__":
    main()
