"""What our loop adds to a bare one: the same micro-batches, model, head, loss, clipping and AdamW, without anything else.

    python scripts/bench/loop.py --size 1m                                              # a bare torch loop, one rank
    torchrun --nproc-per-node 2 scripts/bench/loop.py --size 1m --backend deepspeed --stage 2      # a bare engine
    torchrun --nproc-per-node 2 scripts/bench/loop.py --size 1m --backend deepspeed --stage 3

Ours is what the trainer does between a rollout and the publishing: `RLTrainer.prepare` (credits, packing, advantages) and
`RLTrainer.update` (the backend, metrics and their exchange, the clock). The bare side is a loop by hand, whose inputs lie
ready in the form that its model takes; it logs a loss and a gradient norm. Both live in the same process, and take turns,
who is first changing from pair to pair; in the end their weights must be equal. The bare engine's buckets are as large
as ours, since DeepSpeed's default ones make small models several times slower.

16 prompts x 8 samples of 64 + 64 tokens over all ranks. CPU is the processor time of all ranks, for machines that are not
quiet; wall clock is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from models import PROMPTS, SHAPES, build_model, build_tokenizer
from peer import parser_of
from torch import Tensor, nn
from update import SAMPLES, trajectories

from rl4llm.algorithms.grpo import GRPO
from rl4llm.backends.attention import STREAM_ATTENTION, Stream, stream_of
from rl4llm.backends.heads import OutputLayer, asked_tokens, selected_logprobs
from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.types import Group, SamplingParams, TrainBatch
from rl4llm.data.pack import Batching
from rl4llm.runtime.cpu import keep_freed_memory
from rl4llm.runtime.ranks import Ranks, join_ranks
from rl4llm.sync.inference import Inference, MemoryPublisher
from rl4llm.testing import ScriptedClient
from rl4llm.tracking.resources import PhaseClock, Resources
from rl4llm.trainers.base_trainer import Schedule
from rl4llm.trainers.prepare import Preparation
from rl4llm.trainers.rl import RLStep, RLTrainer

LR, BETAS, MAX_NORM = 1e-4, (0.9, 0.95), 1.0
TOLERANCE = 1e-4  # between the weights of both sides after the last step; a step moves a weight by up to `LR`


@dataclass(frozen=True, slots=True)
class Ready:
    """A micro-batch as the bare side wants it: the model's inputs, and one entry for each of the policy's N tokens."""

    stream: Stream
    before_N: Tensor
    targets_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor

    @classmethod
    def of(cls, batch: TrainBatch) -> Ready:
        stream = stream_of(batch)
        asked_N, before_N = asked_tokens(batch)
        per_token = (batch.token_ids_BT, batch.old_logprobs_BT, batch.advantages_BT, batch.weights_BT)
        return cls(
            stream,
            stream.place_BT.flatten()[before_N],
            *(tensor_BT.flatten()[asked_N] for tensor_BT in per_token),
        )


class LogProbs(nn.Module):
    """The model and the same head, without anything around them."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, ready: Ready) -> Tensor:
        stream = ready.stream
        hidden_1ND = self.model.base_model(
            input_ids=stream.token_ids_1N,
            position_ids=stream.position_ids_1N,
            attention_mask=stream.token_ids_1N.new_empty(1, 1, 0, 0),
            use_cache=False,
            stream=stream,
        ).last_hidden_state
        output = OutputLayer(self.model.get_output_embeddings().weight)
        return selected_logprobs(hidden_1ND[0].index_select(0, ready.before_N), output, ready.targets_N)[0]


def loss_of(module: nn.Module, ready: Ready) -> Tensor:
    ratio_N = (module(ready) - ready.old_logprobs_N).exp()
    gain_N = torch.min(ratio_N * ready.advantages_N, ratio_N.clamp(0.8, 1.2) * ready.advantages_N)
    return -(gain_N * ready.weights_N).sum()


def groups_of(size: str, ranks: Ranks) -> list[Group]:
    """This rank's share of the same groups, with rewards that differ."""
    vocabulary = SHAPES[size]["vocab_size"]
    found = trajectories(vocabulary, PROMPTS, -math.log(vocabulary))
    groups = [Group(str(number), tuple(found[number * SAMPLES :][:SAMPLES])) for number in range(PROMPTS)]
    return groups[ranks.rank :: ranks.size]


def our_backend(args: argparse.Namespace, ranks: Ranks) -> BaseBackend:
    model = load_model(build_model(args.size), device="cpu")
    options = {"lr": LR, "betas": BETAS, "max_grad_norm": MAX_NORM, "ranks": ranks}
    if args.backend == "torch":
        return TorchBackend(model, **options)
    from rl4llm.extensions.deepspeed.backend import DeepSpeedBackend  # an extra

    return DeepSpeedBackend(model, zero_stage=args.stage, **options)


def our_trainer(args: argparse.Namespace, ranks: Ranks) -> RLTrainer:
    """The trainer without rollout, engine and logs, which are not measured; it keeps the metrics of each token."""
    algorithm, backend = GRPO(), our_backend(args, ranks)
    batching = Batching(aggregation=algorithm.aggregation)
    client = ScriptedClient(build_tokenizer(args.size), {"": ["w3"]})
    return RLTrainer(
        algorithm=algorithm, backend=backend, clock=PhaseClock(peak=Resources().peak_gb), schedule=Schedule(1), run=None,
        ranks=ranks,
        inference=Inference(client, MemoryPublisher(client)), rollout=None, prompts=None,
        plan=(), sampling_params=SamplingParams(max_tokens=64), eval_params=SamplingParams(max_tokens=64),
        tracker=SimpleNamespace(stores_episodes=lambda step: True),
        preparation=Preparation(algorithm=algorithm, policy=backend, batching=batching, ranks=ranks),
    )  # fmt: skip


def our_step(trainer: RLTrainer, groups: list[Group]) -> Callable[[], None]:
    def take_step() -> None:
        with trainer.clock("step"):
            step = RLStep(groups)
            for update in trainer.prepare(step):
                trainer.update(update, step)

    return take_step


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)


def bare_torch(module: nn.Module, batches: list[Ready]) -> Callable[[], None]:
    optimizer = adamw(module)

    def step() -> None:
        losses = []
        for ready in batches:
            loss = loss_of(module, ready)
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        torch.stack([*losses, norm]).tolist()

    return step


def bare_deepspeed(
    module: nn.Module, batches: list[Ready], args: argparse.Namespace, ranks: Ranks
) -> Callable[[], None]:
    deepspeed = import_deepspeed()
    bucket = sum(parameter.numel() for parameter in module.parameters())
    engine = deepspeed.initialize(
        model=module,
        optimizer=adamw(module),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": len(batches),
            "zero_optimization": {"stage": args.stage, "reduce_bucket_size": bucket},
            "gradient_clipping": MAX_NORM,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )[0]
    if args.stage == 3:
        for parameter in module.model.get_output_embeddings().parameters():
            deepspeed.zero.register_external_parameter(module, parameter)
    means = float(ranks.size * len(batches))  # of what is to be added up

    def step() -> None:
        losses = []
        for ready in batches:
            loss = loss_of(engine, ready)
            engine.backward(loss * means)
            engine.step()
            losses.append(loss.detach())
        torch.stack(losses).tolist(), float(engine.get_global_grad_norm())

    return step


def bare_side(
    args: argparse.Namespace, ranks: Ranks, batches: list[Ready]
) -> tuple[nn.Module, Callable[[], None]]:
    module = LogProbs(load_model(build_model(args.size), device="cpu"))
    module.model.set_attn_implementation(STREAM_ATTENTION)
    if args.backend == "torch":
        return module, bare_torch(module, batches)
    return module, bare_deepspeed(module, batches, args, ranks)


def timed(step: Callable[[], None], ranks: Ranks) -> tuple[float, float]:
    """Wall-clock and processor seconds."""
    ranks.wait()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    cpu = time.process_time() - cpu
    return time.perf_counter() - wall, cpu


def over_ranks(
    pairs: list[dict[str, tuple[float, float]]], ranks: Ranks
) -> list[dict[str, tuple[float, float]]]:
    """On the first rank: the slowest rank's wall clock and the processor time of all."""
    gathered = ranks.gather(pairs)
    return [
        {side: (max(one[side][0] for one in same), sum(one[side][1] for one in same)) for side in same[0]}
        for same in zip(*gathered, strict=True)
    ]


def show(pairs: list[dict[str, tuple[float, float]]]) -> None:
    for index, name in enumerate(("wall", "cpu")):
        times = {side: [pair[side][index] for pair in pairs] for side in ("bare", "ours")}
        ratios = sorted(ours / bare for bare, ours in zip(times["bare"], times["ours"], strict=True))
        bare, ours = (statistics.median(times[side]) for side in ("bare", "ours"))
        low, middle, high = (quartile - 1 for quartile in statistics.quantiles(ratios, n=4))
        print(
            f"{name:4} bare {bare:8.4f} s   ours {ours:8.4f} s   of medians {ours / bare - 1:+.1%}   "
            f"median of {len(pairs)} pairs {middle:+.1%} (quartiles {low:+.1%} to {high:+.1%})"
        )


def difference(backend: BaseBackend, module: Any, args: argparse.Namespace) -> float:
    """The largest, between the weights of both sides."""
    own = dict(module.model.named_parameters())
    gathered = (
        nullcontext()
        if args.backend == "torch"
        else import_deepspeed().zero.GatheredParameters(list(own.values()))
    )
    with gathered:
        return max((tensor - own[name]).abs().max().item() for name, tensor in backend.weights())


def import_deepspeed() -> Any:
    import deepspeed  # noqa: TID251 - the bare side is DeepSpeed itself

    return deepspeed


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="1m")
    parser.add_argument("--backend", choices=["torch", "deepspeed"], default="torch")
    parser.add_argument("--stage", type=int, choices=[2, 3], default=2)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "2")), help="of each rank"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # for both sides
    ranks = join_ranks(timeout_s=600)
    groups = groups_of(args.size, ranks)
    trainer = our_trainer(args, ranks)
    (update,) = trainer.prepare(RLStep(groups))
    module, bare = bare_side(args, ranks, [Ready.of(batch) for batch in update.batches])
    sides = {"bare": bare, "ours": our_step(trainer, groups)}
    pairs = []
    for number in range(args.pairs + 2):
        pair = {side: timed(sides[side], ranks) for side in sorted(sides, reverse=bool(number % 2))}
        if number > 1:  # the first two are warm-up
            pairs.append(pair)
    pairs = over_ranks(pairs, ranks)
    apart = difference(trainer.backend, module, args)
    if ranks.is_first:
        print(
            f"{args.size}, {ranks.size} ranks of {args.threads} threads, {len(update.batches)} micro-batches of each rank"
        )
        show(pairs)
    if not apart <= TOLERANCE * (args.pairs + 2):
        raise SystemExit(f"The two sides did not compute the same: their weights differ by {apart:.2g}.")
    if ranks.is_first:
        print(f"weights differ by {apart:.1e} at most")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
