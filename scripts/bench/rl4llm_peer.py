"""Our side of `step.py`: the trainer that `rl4llm.GRPOTrainer` builds, its loop taken one step at a time.

Started by `step.py`, not by hand.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers
from peer import Channel, Memory, reward

import rl4llm
from rl4llm import GRPOTrainer
from rl4llm.trainers.rl import RLTrainer


def score(completions: list[Any], **columns: Any) -> list[float]:
    """The reward function: the same as the other side's, on the same kind of text."""
    return [
        reward(completion if isinstance(completion, str) else completion[-1]["content"])
        for completion in completions
    ]


def build(job: dict[str, Any]) -> RLTrainer:
    """The trainer with its defaults, except the job's settings and no evaluation and checkpoints, which TRL lacks too."""
    options = {
        "threads": job["threads"],
        "data.shuffle": False,
        "rollout.prompts": job["prompts"],
        "rollout.group_size": job["group_size"],
        "rollout.max_tokens": job["new_tokens"],
        "training.lr": job["lr"],
        "eval.every": 0,
        "checkpoint.every": 0,
        "max_steps": 1_000_000,
        "output.dir": job["output"],
        **job["overrides"],
    }
    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    return GRPOTrainer(job["model"], rows, [score], **options).trainer


def step(trainer: RLTrainer) -> dict[str, Any]:
    """One turn of `BaseTrainer.train`, report included; returns seconds by phase and how many tokens were trained."""
    start, cpu = time.perf_counter(), time.process_time()
    with trainer.clock("step"):
        collected = trainer.collect()
        generated = time.perf_counter()
        collected.updates = trainer.prepare(collected)
        collected.metrics = [trainer.update(update, collected) for update in collected.updates]
        trainer.step += 1
        trainer.publish()
    trainer.report(collected)
    end = time.perf_counter()
    seconds = {"step": end - start, "generation": generated - start, "update": end - generated}
    return {
        "seconds": seconds | {"cpu": time.process_time() - cpu},
        "tokens": sum(update["update/tokens"] for update in collected.metrics),
    }


def highest_gb(trainer: RLTrainer) -> float:
    """Return the measurements of the phases of the last step."""
    last = json.loads(trainer.run.metrics_file.read_text().splitlines()[-1])
    return max(value for name, value in last.items() if name.startswith("memory/"))


def main() -> None:
    channel = Channel()
    job = json.loads(sys.argv[1])
    transformers.utils.logging.set_verbosity_error()
    with build(job) as trainer:
        trainer.resume()
        # weights of a mapped file become resident
        sum(weight.sum().item() for _, weight in trainer.backend.weights())
        memory = Memory()
        trainer.publish()
        versions = {
            "rl4llm": rl4llm.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }
        channel.send(ready=True, versions=versions)
        while channel.wait():
            channel.send(**step(trainer), **memory.report(highest_gb(trainer)))


if __name__ == "__main__":
    main()
