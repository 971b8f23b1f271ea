"""How much memory it takes to go through all weights of a ZeRO-3 model, tensor by tensor, as publishing does.

    torchrun --nproc-per-node 2 scripts/bench/stream.py

The model is the 30m one with a vocabulary of 65,536: its largest tensors have 134 MB in fp32, a tenth of what two ranks
hold of it. On each rank, the growth of the resident set's high-water mark over what is resident before the first tensor is
asked for, in units of the largest tensor; the target is below 2. Nothing is kept of a tensor that was seen.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from models import build_model
from peer import Memory

from rl4llm.backends.models import load_model
from rl4llm.extensions.deepspeed.backend import DeepSpeedBackend
from rl4llm.runtime.ranks import join_ranks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=65_536)
    parser.add_argument("--passes", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = join_ranks(timeout_s=600)
    model = load_model(build_model("30m", vocab_size=args.vocabulary), device="cpu")
    backend = DeepSpeedBackend(model, ranks=ranks, zero_stage=3, lr=1e-6)
    largest = max(spec.num_bytes for spec in backend.weight_specs())
    for number in range(1, args.passes + 1):
        ranks.wait()
        memory = Memory()
        total = sum(tensor.nbytes for _, tensor in backend.weights())
        grown = ranks.gather(memory.report()["growth_gb"] * 1e9 / largest)
        if ranks.is_first:
            shares = " and ".join(f"{share:.2f}" for share in grown)
            print(
                f"pass {number}: {total / 1e6:.0f} MB, the largest {largest / 1e6:.0f} MB, growth by rank {shares} of it"
            )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
