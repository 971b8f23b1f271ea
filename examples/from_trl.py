"""A script written for TRL, which trains here too: what differs is where GRPOConfig and GRPOTrainer are imported from.

    python examples/from_trl.py [--model DIRECTORY] [--steps 30]
    ../trl/bin/python examples/from_trl.py --library trl --model DIRECTORY      # in an environment with TRL

The model learns to say the largest of three digits. Without --model a small one is made, which says any of them.
"""

import argparse
import importlib
import json
import random
import tempfile
from pathlib import Path

from datasets import Dataset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--library", choices=["rl4llm", "trl"], default="rl4llm")
parser.add_argument("--model", help="a Hugging Face directory")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--output", default=tempfile.mkdtemp(prefix="from-trl-"))


def rows(count: int, seed: int = 0) -> list[dict]:
    """Draw prompts of three digits; the answer is the largest of them."""
    draw = random.Random(seed)
    digits = [[str(draw.randrange(10)) for _ in range(3)] for _ in range(count)]
    return [
        {"prompt": [{"role": "user", "content": " ".join(three)}], "largest": max(three)} for three in digits
    ]


curve = []


def is_largest(completions, largest, **columns):
    """Return 1 for the right digit, else 0."""
    rewards = [
        float(said[0]["content"].strip() == right) for said, right in zip(completions, largest, strict=True)
    ]
    curve.append(sum(rewards) / len(rewards))
    return rewards


if __name__ == "__main__":
    options = parser.parse_args()
    if options.model is None:
        from shared import any_digit_model

        options.model = any_digit_model(Path(f"{options.output}-start"), rows(2048, seed=1))
    # `from trl import ...`, or `from rl4llm_compat.trl import ...`
    library = importlib.import_module("trl" if options.library == "trl" else "rl4llm_compat.trl")
    GRPOConfig, GRPOTrainer = library.GRPOConfig, library.GRPOTrainer

    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=is_largest,
        train_dataset=Dataset.from_list(rows(512)),
        args=GRPOConfig(
            output_dir=options.output,
            learning_rate=1e-3,
            num_generations=8,
            per_device_train_batch_size=64,
            max_completion_length=4,
            max_steps=options.steps,
            lr_scheduler_type="constant",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            seed=options.seed,
        ),
    )
    trainer.train()
    Path(options.output, "curve.json").write_text(json.dumps(curve))
    last = curve[-10:]
    print(
        f"reward {curve[0]:.3f} -> {sum(last) / len(last):.3f} (last ten of {len(curve)} steps), with {options.library}"
    )
