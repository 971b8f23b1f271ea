"""What runs with several environments are made of: two small datasets, an environment of two turns, and rewards."""

import json
import os
import signal
from pathlib import Path

import vowels

from rl4llm.core.base_env import BaseRewardFunction


class Late(BaseRewardFunction):
    """How late in the alphabet the last letter comes; the third batch kills the process while the file `killer` is there."""

    success_at = 1.0

    def __init__(self, name="late", killer=None):
        super().__init__(name)
        self.killer, self.batches = killer, 0

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        return (ord(messages[-1].content[-1:] or "a") % 32) / 32

    def score_batch(self, samples):
        self.batches += 1
        if self.killer and self.batches == 3 and os.path.exists(self.killer):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().score_batch(samples)


class Vowels(vowels.Vowels):
    """The share of vowels, where all of them are a success."""

    success_at = 1.0


def rows(directory, name, size):
    """Write a file of prompts and return how to read it."""
    path = Path(directory) / f"{name}.jsonl"
    prompts = [{"id": str(i), "prompt": f"Say {name} {i}.", "ground_truth": str(i)} for i in range(size)]
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return {"path": str(path), "prompt_column": "prompt"}


def parts(directory, killer=None):
    """Return two parts: of every three prompts two get one turn, in `words`, and one gets two, in `talk`."""
    return {
        "words": {
            "weight": 2,
            "data": rows(directory, "words", 5),
            "rewards": [{"name": "mixture_parts:Vowels"}],
        },
        "talk": {
            "data": rows(directory, "talk", 3),
            "env": {"name": "ended_runs:TwoTurns", "max_steps": 2},
            "rewards": [{"name": "mixture_parts:Late", "killer": killer}],
            "rollout": {"max_tokens": 4},
        },
    }
