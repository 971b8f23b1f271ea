"""Where the time of the update of a GRPO step is: the share of its bfloat16 products, and how near they come to their rate.

    python scripts/bench/update.py --model SMOLLM2 --prompts 4 --autocast bfloat16

16 prompts x 8 samples, 64 prompt and 64 new tokens. The line of the machine has the rate of a large product.
"""

from __future__ import annotations

import argparse

import torch
from models import PROMPTS, SHAPES, build_model, build_prompts, describe_machine, load_model
from peer import parser_of
from torch.profiler import ProfilerActivity, profile

from rl4llm.backends.models import load_model as as_trained
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.types import TokenSpan, Trajectory
from rl4llm.data.pack import Batching
from rl4llm.runtime.cpu import keep_freed_memory

SAMPLES, NEW_TOKENS = 8, 64
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")  # the last one of layers with a bias


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


def show_products(args: argparse.Namespace) -> None:
    """Print the share of products in the time of some updates, and their rate."""
    dtype = getattr(torch, args.dtype)
    model = load_model(args.model)[0].to(dtype) if args.model else build_model(args.size, dtype)
    backend = TorchBackend(as_trained(model, dtype=args.dtype), lr=1e-6, autocast=args.autocast)
    given = trajectories(model.config.vocab_size, args.prompts)
    credits, batching = [1.0, -1.0] * (len(given) // 2), Batching("shared", max_tokens_per_batch=2304)

    def step() -> None:
        for batch in batching.pack(given, credits):
            backend.forward_backward(batch, losses)
        backend.optim_step()

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


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="1m")
    parser.add_argument("--model", help="the directory of a pretrained model, instead of --size")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="with 8 samples each")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    parser.add_argument("--autocast", choices=["none", "bfloat16"], default="none", help="of the products")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if "bfloat16" not in (args.autocast, args.dtype):
        parser.error("only bfloat16 products are counted: give --autocast bfloat16 or --dtype bfloat16")
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    show_products(args)


if __name__ == "__main__":
    main()
