"""Log-probs of 16 x 512 tokens at a vocabulary of 32,000, forward and backward: the chunked head against the naive path.

    python scripts/bench/logprobs.py [--threads 1] [--hidden 512] [--rounds 3]

Both sides use the same matrix-product kernels. Times alternate within one process; peak memory is the growth of the
resident set's high-water mark in a separate process per side. Ratios above 1 favour the head.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from peer import Memory, in_turns, parser_of

from rl4llm.backends.heads import OutputLayer, selected_logprobs
from rl4llm.runtime.cpu import linear

VOCABULARY, TOKENS = 32_000, 16 * 512
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def naive(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """All logits at once, then log_softmax and gather."""
    return linear(hidden_ND, weight_VD).log_softmax(-1).gather(1, targets_N[:, None]).squeeze(1)


def ours(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return selected_logprobs(hidden_ND, OutputLayer(weight_VD), targets_N)[0]


SIDES = {"naive": naive, "ours": ours}


def inputs(hidden: int) -> Inputs:
    torch.manual_seed(0)
    hidden_ND = torch.randn(TOKENS, hidden, requires_grad=True)
    weight_VD = torch.randn(VOCABULARY, hidden).mul_(0.02).requires_grad_()
    return hidden_ND, weight_VD, torch.randint(0, VOCABULARY, (TOKENS,))


def step(side: Callable[..., torch.Tensor], given: Inputs) -> float:
    """Seconds of one forward and backward pass."""
    for tensor in given[:2]:
        tensor.grad = None
    start = time.perf_counter()
    side(*given).sum().backward()
    return time.perf_counter() - start


def peak_gb(side: str, hidden: int) -> float:
    """Growth of the high-water mark over what the inputs and a tiny pass take."""
    given = inputs(hidden)
    rows = [
        tensor[:count].detach().requires_grad_() for tensor, count in zip(given[:2], (8, 64), strict=True)
    ]
    step(SIDES[side], (*rows, given[2][:8] % 64))
    memory = Memory()
    step(SIDES[side], given)
    return memory.report()["growth_gb"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak-of", choices=SIDES, help="print only the peak memory of this side")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_of:
        print(json.dumps(peak_gb(args.peak_of, args.hidden)))
        return
    peaks = {}
    for name in SIDES:
        command = [sys.executable, *sys.argv, "--peak-of", name]
        peaks[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    given = inputs(args.hidden)
    times = in_turns({name: partial(step, side, given) for name, side in SIDES.items()}, args.rounds)
    best = {name: min(values) for name, values in times.items()}
    for name in SIDES:
        print(f"{name:6} {best[name]:7.2f} s   {peaks[name]:6.2f} GB extra")
    memory = peaks["naive"] / max(peaks["ours"], 1e-9)
    print(f"time ratio {best['naive'] / best['ours']:.2f}, memory ratio {memory:.1f}")


if __name__ == "__main__":
    main()
