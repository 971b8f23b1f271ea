"""The update of one GRPO step alone: this backend against the usual padded micro-batches of 32 rows.

    python scripts/bench/update.py --size 30m [--autocast bfloat16] [--rounds 3] [--threads 2]
    python scripts/bench/update.py --model SMOLLM2 --prompts 4 --autocast bfloat16 --products

16 prompts x 8 samples, 64 prompt and 64 new tokens. The other side is the Hugging Face model on padded rows, logits for
the completions only, log_softmax, `torch.optim.AdamW`; both sides have the same matrix-product kernels and the same
weights. Rounds alternate; peak memory is that of a separate process per side. Ratios above 1 favour the backend.

`--products` profiles updates of the backend alone instead: how much of the time its bfloat16 products take, and how near
they come to the rate of a large product.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from models import (
    PROMPT_TOKENS,
    PROMPTS,
    SHAPES,
    build_model,
    build_prompts,
    describe_machine,
    load_model,
)
from torch.profiler import ProfilerActivity, profile

from rl4llm.backends.models import load_model as as_trained
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.types import TokenSpan, Trajectory
from rl4llm.data.pack import Batching
from rl4llm.runtime.cpu import keep_freed_memory, use_fast_linear

SAMPLES, NEW_TOKENS, ROWS = 8, 64, 32
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")  # the last one of layers with a bias
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(args: argparse.Namespace) -> torch.nn.Module:
    if args.model:
        return load_model(args.model)[0].to(DTYPES[args.dtype])
    return build_model(args.size, DTYPES[args.dtype])


def trajectories(vocabulary: int, prompts: int, logprob: float = -6.0) -> list[Trajectory]:
    """Of equal length and random tokens, each sampled with the same log-prob; rewards are random numbers."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, prompt in enumerate(build_prompts(vocabulary, prompts)):
        for _ in range(SAMPLES):
            ids = torch.randint(3, vocabulary, (NEW_TOKENS,), generator=generator).tolist()
            spans = (TokenSpan.context(prompt), TokenSpan(tuple(ids), "policy", (logprob,) * NEW_TOKENS, 0))
            reward = torch.rand((), generator=generator).item()
            found.append(Trajectory(str(number), spans, (), {}, reward, "length"))
    return found


def losses(batch, logprobs_BT, entropy_BT):
    ratio_BT = (logprobs_BT - logprobs_BT.detach()).exp()
    return -torch.min(ratio_BT * batch.credits_BT, ratio_BT.clamp(0.8, 1.2) * batch.credits_BT), {}


def our_side(args: argparse.Namespace) -> Callable[[], None]:
    model = as_trained(build(args), dtype=args.dtype)
    given = trajectories(model.config.vocab_size, args.prompts)
    credits = [1.0, -1.0] * (len(given) // 2)
    backend = TorchBackend(model, lr=1e-6, autocast=args.autocast)

    batching = Batching(args.layout, max_tokens_per_batch=args.max_tokens)

    def step() -> None:
        for batch in batching.pack(given, credits):
            backend.forward_backward(batch, losses)
        backend.optim_step()

    return step


def padded_side(args: argparse.Namespace) -> Callable[[], None]:
    model = build(args)
    use_fast_linear(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    given = trajectories(model.config.vocab_size, args.prompts)
    ids_BT = torch.tensor([trajectory.token_ids for trajectory in given])
    credits_B = torch.tensor([1.0, -1.0] * (len(ids_BT) // 2))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=args.autocast == "bfloat16")

    def step() -> None:
        for rows, credit_B in zip(ids_BT.split(ROWS), credits_B.split(ROWS), strict=True):
            with autocast:
                mask = torch.ones_like(rows)
                logits = model(
                    rows, attention_mask=mask, logits_to_keep=NEW_TOKENS + 1, use_cache=False
                ).logits
            logp = logits[:, :-1].float().log_softmax(-1).gather(2, rows[:, PROMPT_TOKENS:, None]).squeeze(2)
            ratio = (logp - logp.detach()).exp()
            (
                -torch.min(ratio * credit_B[:, None], ratio.clamp(0.8, 1.2) * credit_B[:, None]).sum()
                / len(ids_BT)
                / NEW_TOKENS
            ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


SIDES = {"padded": padded_side, "ours": our_side}


def peak_bytes(side: str, args: argparse.Namespace) -> int:
    step = SIDES[side](args)
    step()
    step()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def measured_peak(side: str, args: argparse.Namespace) -> int:
    command = [sys.executable, *sys.argv, "--peak-of", side]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def show_products(args: argparse.Namespace) -> None:
    """Print the share of products in our side's time, and their rate, from a profile of some updates."""
    step = our_side(args)
    step()
    print(describe_machine())
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as trace:
        for _ in range(args.rounds):
            step()
    events = trace.key_averages()
    products = [event for event in events if event.key in PRODUCTS]
    total, taken = (sum(event.self_cpu_time_total for event in group) / 1e6 for group in (events, products))
    operations = sum(event.flops for event in products)
    print(
        f"an update: {total / args.rounds:.2f} s, products {taken / total:.0%} of it; "
        f"{operations / args.rounds / 1e12:.2f} TFLOP at {operations / taken / 1e9:.0f} GFLOP/s"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(SHAPES), default="1m")
    parser.add_argument("--model", help="the directory of a pretrained model, instead of --size")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="with 8 samples each")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights")
    parser.add_argument(
        "--autocast", choices=["none", "bfloat16"], default="none", help="of the matrix products"
    )
    parser.add_argument("--layout", choices=["sorted", "packed", "shared"], default="shared")
    parser.add_argument("--max-tokens", type=int, default=2304)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-seconds", action="store_true", help="for a busy machine: CPU seconds instead of wall clock"
    )
    parser.add_argument("--no-peaks", action="store_true")
    parser.add_argument(
        "--products", action="store_true", help="profile our side; only bfloat16 products are counted"
    )
    parser.add_argument("--peak-of", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.products and "bfloat16" not in (args.autocast, args.dtype):
        parser.error("--products requires --autocast bfloat16 or --dtype bfloat16")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    if args.products:
        keep_freed_memory()
        show_products(args)
        return
    if args.peak_of:
        print(json.dumps(peak_bytes(args.peak_of, args)))
        return
    peaks = {} if args.no_peaks else {side: measured_peak(side, args) for side in SIDES}
    clock = time.process_time if args.cpu_seconds else time.perf_counter
    steps = {side: make(copy.copy(args)) for side, make in SIDES.items()}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(args.rounds + 1):
        for side, step in steps.items():
            start = clock()
            step()
            if number:  # the first is warm-up
                times[side].append(clock() - start)
    for side in SIDES:
        peak = f"{peaks[side] / 1e9:6.2f} GB peak" if peaks else ""
        print(
            f"{side:7} best {min(times[side]):7.3f} s   median {statistics.median(times[side]):7.3f} s   {peak}"
        )
    ratios = [padded / ours for padded, ours in zip(times["padded"], times["ours"], strict=True)]
    print(f"time ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    if peaks:
        print(f"memory ratio {peaks['padded'] / peaks['ours']:.2f}")


if __name__ == "__main__":
    main()
