"""A reward that a tiny model learns in a few steps, and the run in which it does."""

import json

from rl4llm.api import GRPOTrainer
from rl4llm.core.base_env import BaseRewardFunction

WHOLE = {"training.lr": 6e-3, "max_steps": 14}  # from 0.17 to about 0.54


class Vowels(BaseRewardFunction):
    """The share of vowels in the last message."""

    def __init__(self, name="vowels", **kwargs):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        said = messages[-1].content.lower()
        return sum(letter in "aeiou" for letter in said) / max(len(said), 1)


def prompts(count=6):
    """Return rows that ask to say a number."""
    return [
        {"prompt_id": str(i), "messages": [{"role": "user", "content": f"Say {i}."}], "ground_truth": str(i)}
        for i in range(count)
    ]


def learn_vowels(ranks, model_dir, directory, inference, **options):
    """Train through a server, with four prompts a step for any number of ranks."""
    rows = [{"messages": [{"role": "user", "content": f"Say {i}."}], "ground_truth": ""} for i in range(4)]
    GRPOTrainer(
        str(model_dir),
        rows,
        [Vowels()],
        output={"dir": str(directory)},
        inference=inference,
        rollout={"prompts": 4 // ranks.size, "group_size": 16, "max_tokens": 8},
        mismatch={"stop_above": 1e-4},
        **{"model.autocast": "none", **options},  # the servers compute in float32
    ).train()


def check_learned(directory, steps):
    """Check that it learned from weights proven at each step, and from tokens with the trainer's log-probs."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    assert len(rewards) == steps
    assert rewards[0] < 0.25
    later = rewards[steps // 2 :]
    assert sum(later) / len(later) > 0.35  # half vowels is where some runs rest for a while
    taught = [row for row in rows if "mismatch/max" in row]  # at the end all rewards of a step may be equal
    assert len(taught) > steps // 2
    assert all(row["mismatch/max"] < 1e-4 and row["mismatch/ess"] > 0.999 for row in taught)
    assert all("time/verify" in row for row in rows)
