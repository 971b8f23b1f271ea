"""What a checkpoint with hashes, verified names and a rename costs over the plain save of the same state.

    python scripts/bench/save.py --size 30m                                        # over safetensors.save_file
    torchrun --nproc-per-node 2 scripts/bench/save.py --size 30m --backend deepspeed     # over DeepSpeed's save_checkpoint

Ours is `save_checkpoint` of the trainer: weights, moments and state in files that any number of ranks can resume from, a
manifest with the xxh3 of each, everything on disk, renamed. The plain side is `safetensors.torch.save_file` of the very
tensors in those files or, with DeepSpeed, `engine.save_checkpoint` of the very engine, in which each rank writes its own
part. Both end with fsync. They take turns, each into a separate directory that is deleted afterwards. Wall clock is that
of the slowest rank, CPU the processor time of all of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from loop import groups_of, our_trainer, over_ranks, show, timed
from models import SHAPES
from safetensors.torch import load_file, save_file

from rl4llm.runs.checkpoint import save_checkpoint
from rl4llm.runs.run_dir import sync_file
from rl4llm.runtime.ranks import Ranks, join_ranks
from rl4llm.trainers.rl import RLStep, RLTrainer

Save = Callable[[Path], None]


def trained(args: argparse.Namespace, ranks: Ranks) -> RLTrainer:
    """After one step, so that there are moments."""
    trainer = our_trainer(args, ranks)
    step = RLStep(groups_of(args.size, ranks)[:1])
    for update in trainer.prepare(step):
        trainer.update(update, step)
    return trainer


def ours(trainer: RLTrainer, ranks: Ranks) -> Save:
    return lambda directory: save_checkpoint(
        directory, 1, trainer.write_checkpoint, {"step": 1}, keep=1, ranks=ranks
    )


def plain_torch(written: Path) -> Save:
    """Of the tensors that the other side wrote there."""
    held = {path.name: load_file(path) for path in written.rglob("*.safetensors")}

    def save(directory: Path) -> None:
        directory.mkdir()
        for name, tensors in held.items():
            save_file(tensors, directory / name)
            sync_file(directory / name)

    return save


def plain_deepspeed(trainer: RLTrainer, ranks: Ranks) -> Save:
    engine = trainer.backend._engine  # type: ignore[attr-defined]  # the very one

    def save(directory: Path) -> None:
        engine.save_checkpoint(str(directory), tag="plain")
        for path in sorted(file for file in directory.rglob("*") if file.is_file())[ranks.rank :: ranks.size]:
            sync_file(path)
        ranks.wait()

    return save


def cleanly(save: Save, directory: Path, ranks: Ranks) -> tuple[float, float]:
    """Seconds of one save into a new directory, which is removed."""
    taken = timed(lambda: save(directory), ranks)
    ranks.wait()
    if ranks.is_first:
        shutil.rmtree(directory)
        os.sync()  # what the one side left to be written is not the other's to wait for
    ranks.wait()
    return taken


def measure(args: argparse.Namespace, root: Path, ranks: Ranks) -> None:
    trainer = trained(args, ranks)
    save = ours(trainer, ranks)
    save(root / "first")
    size = sum(path.stat().st_size for path in (root / "first").rglob("*.safetensors"))
    plain = plain_deepspeed(trainer, ranks) if args.backend == "deepspeed" else plain_torch(root / "first")
    sides = {"bare": plain, "ours": save}
    pairs = [
        {side: cleanly(sides[side], root / side, ranks) for side in sorted(sides, reverse=bool(number % 2))}
        for number in range(args.pairs + 1)
    ]
    pairs = over_ranks(pairs[1:], ranks)  # the first is warm-up
    if ranks.is_first:
        print(f"{args.size}, {ranks.size} ranks, {args.backend}, {size / 1e6:.0f} MB in a checkpoint of ours")
        show(pairs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(SHAPES), default="30m")
    parser.add_argument("--backend", choices=["torch", "deepspeed"], default="torch")
    parser.add_argument("--stage", type=int, choices=[2, 3], default=2)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--dir", default=None, help="on the file system to measure (default: the temporary directory)"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    ranks = join_ranks(timeout_s=600)
    root = Path(ranks.share(tempfile.mkdtemp(dir=args.dir) if ranks.is_first else None))
    try:
        measure(args, root, ranks)
        ranks.wait()
    finally:
        if ranks.is_first:
            shutil.rmtree(root)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
