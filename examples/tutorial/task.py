"""What the chapters share: a task, and a small model that is right about three times in four.

A question is a number of four digits. The answer is 1 if it is odd, and 0 if it is even.
"""

import json
import random
from pathlib import Path

from rl4llm import BaseRewardFunction, SFTTrainer
from rl4llm.backends.tiny import build_model, build_tokenizer, save_model

QUIET = {
    "threads": 1,
    "tracking": {"tensorboard": False},
    "checkpoint": {"every": 0},
    "output.console": "quiet",
}


def problems(count: int, held_out: bool = False) -> list[dict]:
    """Return rows with a number and its parity; no held-out number is ever trained on."""
    numbers = list(range(1000, 10000))
    random.Random(0).shuffle(numbers)
    chosen = numbers[:count] if held_out else numbers[2000 : 2000 + count]
    return [{"prompt": str(number), "ground_truth": str(number % 2)} for number in chosen]


class Right(BaseRewardFunction):
    """1 if the answer is the right digit and nothing else."""

    success_at = 1.0

    def __init__(self, name="right"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **columns) -> float:
        return float(messages[-1].content.strip() == ground_truth)


def conversation(question: str, answer: str) -> dict:
    """Return a row for SFT."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def random_model(directory: Path) -> Path:
    """Write a Llama model of 0.1 million random weights, and its tokenizer."""
    tokenizer = build_tokenizer(["user\n1234\nassistant\n0\n"])
    save_model(build_model(tokenizer, seed=0, hidden_size=64, num_layers=2), tokenizer, directory)
    return directory


def imitate(answers: list[dict], directory: Path, steps: int, seed: int = 0) -> Path:
    """Train a random model on conversations, 32 a step, and return its directory."""
    trainer = SFTTrainer(
        model=random_model(directory / "random"),
        dataset=answers,
        max_steps=steps,
        rollout={"prompts": 32},
        training={"lr": 3e-3},
        **{"output.dir": str(directory / "sft")},
        seed=seed,
        **QUIET,
    )
    trainer.train().save_pretrained(directory / "model")
    return directory / "model"


def teacher(wrong: float = 0.25, text: str = "{}") -> list[dict]:
    """Return answers to imitate, written as `text`; a share of them is wrong."""
    draw = random.Random(0)
    return [
        conversation(row["prompt"], text.format(int(row["ground_truth"]) ^ (draw.random() < wrong)))
        for row in problems(5000)
    ]


def history(directory: Path) -> list[dict]:
    """Return the metrics of each training step of a run."""
    rows = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "groups/zero_spread" in row]
