"""One update on forked episodes: prefix sharing of all that records share, of the prompt alone, and none.

    python scripts/bench/tree.py                                  # 8 forks of 4 turns, a model of 30 million parameters
    python scripts/bench/tree.py --turns 1                        # 8 samples of a prompt, which share nothing else
    python scripts/bench/tree.py --model SMOLLM2 --dtype bfloat16

The last turn has `--forks` answers, and each turn before it half as many, as in a search. All sides compute the gradient of
the same records, in alternation, with micro-batches of at most 4,096 tokens. The tokens that a side computes are exact.
The ratios are of processor time ("cpu") and of wall-clock time; on a busy machine read the first.
"""

from __future__ import annotations

import random
import statistics
import time
from functools import partial
from typing import Any

import torch
from models import SHAPES, build_model, load_model, processor
from peer import in_turns, parser_of, ratios, spread

from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.types import TokenSpan, TrainBatch, Trajectory
from rl4llm.data import layouts
from rl4llm.data.pack import Batching
from rl4llm.data.plan import is_computed
from rl4llm.runtime.cpu import use_fast_linear

SIDES = {"none": ("packed", 0), "prompt": ("shared", 1 << 40), "all": ("shared", layouts.SHORTEST)}
"""The layout of each side, and the fewest tokens that it shares beyond the prompt."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=SHAPES, default="30m")
    parser.add_argument("--model", help="directory of a pretrained model instead")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of matrix products"
    )
    parser.add_argument("--forks", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--lengths", type=int, nargs=3, default=[256, 96, 32], help="of prompt, answer and reply"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(options.model)[0] if options.model else build_model(options.size)
    use_fast_linear(model)
    backend = TorchBackend(model, lr=0.0, autocast="none" if options.dtype == "float32" else options.dtype)
    prompt, answer, reply = options.lengths
    records = episodes(options.forks, options.turns, prompt, answer, reply, model.config.vocab_size)
    batches = {side: packed(records, *how) for side, how in SIDES.items()}
    tokens = {side: sum(int(is_computed(batch).sum()) for batch in parts) for side, parts in batches.items()}
    taken = in_turns(
        {side: partial(update, backend, parts) for side, parts in batches.items()}, options.rounds
    )
    print(f"{processor()}; {backend.path()}; {options.forks} forks of {options.turns} turns")
    for side in SIDES:
        cpu, wall = (statistics.median(times[kind] for times in taken[side]) for kind in (0, 1))
        print(f"sharing {side}: {tokens[side]:,} tokens, {cpu:.2f} s cpu, {wall:.2f} s")
    for side in ("none", "prompt"):
        over, under = taken[side], taken["all"]
        cpu, wall = (ratios([x[kind] for x in over], [x[kind] for x in under]) for kind in (0, 1))
        print(
            f"{side} / all: {tokens[side] / tokens['all']:.2f} tokens, {spread(cpu)} cpu, {spread(wall)} wall-clock"
        )


def episodes(
    forks: int, turns: int, prompt: int, answer: int, reply: int, vocabulary: int
) -> list[Trajectory]:
    """Return the episodes of one prompt, whose turns are answers and replies of these numbers of tokens."""
    draw = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, vocabulary) for _ in range(count))

    paths: list[tuple[TokenSpan, ...]] = [(TokenSpan.context(tokens(prompt)),)]
    for later in reversed(range(turns)):
        count = max(1, forks >> later)
        paths = [
            (
                *paths[number * len(paths) // count],
                TokenSpan(tokens(answer), "policy", (-8.0,) * answer, 0),
                TokenSpan.context(tokens(reply)),
            )
            for number in range(count)
        ]
    return [Trajectory("prompt", path, (), {}, 0.0, "stop") for path in paths]


def packed(records: list[Trajectory], layout: str, shortest: int) -> list[TrainBatch]:
    """Return micro-batches of records with credits of both signs."""
    layouts.SHORTEST = shortest
    credits = [1.0 if number % 2 else -0.5 for number in range(len(records))]
    return Batching(layout, max_tokens_per_batch=4096).pack(records, credits)


def update(backend: TorchBackend, batches: list[TrainBatch]) -> tuple[float, float]:
    """Compute loss and gradient; return the seconds of the processor and of the wall clock."""
    start = time.process_time(), time.perf_counter()
    for batch in batches:
        backend.forward_backward(batch, losses)
    backend.model.zero_grad()
    return time.process_time() - start[0], time.perf_counter() - start[1]


def losses(
    batch: TrainBatch, logprobs_BT: torch.Tensor, _: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a policy gradient."""
    return -batch.credits_BT * (logprobs_BT - batch.sampled_logprobs_BT).exp(), {}


if __name__ == "__main__":
    main()
