"""Log-probs of 16 x 512 tokens at a vocabulary of 32,000, forward and backward: the chunked head against the naive path.

    python scripts/bench/logprobs.py [--threads 1] [--hidden 512] [--rounds 3]

Both sides use the same matrix-product kernels. Times alternate within one process; peak memory is the growth of the
resident set's high-water mark in a separate process per side. Ratios above 1 favour the head.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

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


def inputs(tokens: int, hidden: int) -> Inputs:
    torch.manual_seed(0)
    hidden_ND = torch.randn(tokens, hidden, requires_grad=True)
    weight_VD = torch.randn(VOCABULARY, hidden).mul_(0.02).requires_grad_()
    return hidden_ND, weight_VD, torch.randint(0, VOCABULARY, (tokens,))


def step(side: Callable[..., torch.Tensor], given: Inputs) -> float:
    """Seconds of one forward and backward pass."""
    for tensor in given[:2]:
        tensor.grad = None
    start = time.perf_counter()
    side(*given).sum().backward()
    return time.perf_counter() - start


def high_water_mark() -> int:
    """The largest resident set of this process so far, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def peak_bytes(side: str, hidden: int) -> int:
    """Growth of the high-water mark over what the inputs and a tiny pass take."""
    given = inputs(TOKENS, hidden)
    step(
        SIDES[side],
        (given[0][:8].detach().requires_grad_(), given[1][:64].detach().requires_grad_(), given[2][:8] % 64),
    )
    before = high_water_mark()
    step(SIDES[side], given)
    return high_water_mark() - before


def measured_peak(side: str, args: argparse.Namespace) -> int:
    command = [
        sys.executable,
        __file__,
        "--threads",
        str(args.threads),
        "--hidden",
        str(args.hidden),
        "--peak-of",
        side,
    ]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak-of", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_of:
        print(json.dumps(peak_bytes(args.peak_of, args.hidden)))
        return
    peaks = {name: measured_peak(name, args) for name in SIDES}
    given = inputs(TOKENS, args.hidden)
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for round_number in range(args.rounds + 1):
        for name, side in SIDES.items():
            seconds = step(side, given)
            if round_number:  # the first is warm-up
                times[name].append(seconds)
    best = {name: min(values) for name, values in times.items()}
    for name in SIDES:
        print(f"{name:6} {best[name]:7.2f} s   {peaks[name] / 1e9:6.2f} GB extra")
    print(
        f"time ratio {best['naive'] / best['ours']:.2f}, memory ratio {peaks['naive'] / max(peaks['ours'], 1):.1f}"
    )


if __name__ == "__main__":
    main()
