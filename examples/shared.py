"""What the examples share: their options, a few prompts, and a small model for machines without any."""

import argparse
import json
import random
import tempfile
from pathlib import Path

from rl4llm import SFTTrainer
from rl4llm.backends.tiny import build_model, build_tokenizer, save_model


def arguments(description: str) -> argparse.Namespace:
    """Parse --model, --steps and --output; make the default model and output in a new temporary directory."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face directory (default: a small one with random weights)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default=None, help="where the run is written (default: a new directory)")
    options = parser.parse_args()
    if options.output is None:
        options.output = str(Path(tempfile.mkdtemp(prefix=f"rl4llm-{Path(parser.prog).stem}-")) / "run")
    if options.model is None:
        options.model = str(Path(options.output).with_name("model"))
        tokenizer = build_tokenizer(
            ["Guess my number from 0 to 9. Higher. Lower. Say something."], vocab_size=300
        )
        save_model(
            build_model(tokenizer, seed=0, hidden_size=64, num_layers=2), tokenizer, Path(options.model)
        )
    return options


def prompts(text: str = "Say something.", answers: list[str] | None = None) -> list[dict]:
    """Return rows with `messages` and `ground_truth`."""
    return [
        {"prompt_id": str(i), "messages": [{"role": "user", "content": text}], "ground_truth": answer}
        for i, answer in enumerate(answers or [""] * 4)
    ]


def print_progress(output: str) -> None:
    """Print the reward at the start and at the end."""
    rows = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f} in {len(rewards)} steps, logs in {output}")


def any_digit_model(directory: Path, rows: list[dict]) -> str:
    """Train a small model to answer each prompt with any one of its digits, and return its directory."""
    draw = random.Random(0)
    told = [
        {
            "messages": [
                *row["prompt"],
                {"role": "assistant", "content": draw.choice(row["prompt"][0]["content"].split())},
            ]
        }
        for row in rows
    ]
    tokenizer = build_tokenizer(["0 1 2 3 4 5 6 7 8 9"], vocab_size=300)
    save_model(build_model(tokenizer, seed=0, hidden_size=64, num_layers=2), tokenizer, directory / "random")
    warm_up = SFTTrainer(
        model=directory / "random",
        dataset=told,
        max_steps=len(told) // 32,
        rollout={"prompts": 32},
        training={"lr": 2e-3},
        tracking={"tensorboard": False},
        output={"dir": str(directory / "run")},
    )
    warm_up.train().save_pretrained(directory / "model")
    return str(directory / "model")
