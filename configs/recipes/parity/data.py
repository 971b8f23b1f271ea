"""A tiny model with random weights, answers to imitate, and problems: a number, to answer with 1 if it is odd and 0 if not.

    python configs/recipes/parity/data.py DIRECTORY

A quarter of the answers to imitate are wrong.
"""

import argparse
import json
import random
from pathlib import Path

from rl4llm.backends.tiny import build_model, build_tokenizer, save_model

HELD_OUT, IMITATED, WRONG = 256, 5000, 0.25

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    choose = random.Random(0)
    numbers = list(range(1000, 10000))
    choose.shuffle(numbers)
    rows = [{"question": str(number), "answer": str(number % 2)} for number in numbers]
    answers = [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": str(int(row["answer"]) ^ (choose.random() < WRONG))},
            ]
        }
        for row in rows[HELD_OUT : HELD_OUT + IMITATED]
    ]
    splits = {"test": rows[:HELD_OUT], "train": rows[HELD_OUT:], "answers": answers}
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in splits.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    tokenizer = build_tokenizer(f"user\n{row['question']}\nassistant\n{row['answer']}\n" for row in rows)
    save_model(build_model(tokenizer, seed=0, hidden_size=64, num_layers=2), tokenizer, directory / "model")
