"""Make a tiny vision-language model and images of noisy colours: python data.py DIRECTORY."""

import base64
import io
import json
import random
import sys
from pathlib import Path

import PIL.Image

from rl4llm.backends.tiny_vision import build_vision_model, build_vision_tokenizer, save_vision_model

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 220), "yellow": (230, 220, 50)}
QUESTION = "<image>Which colour is this?"
SIDE, NOISE = 64, 60.0


def picture(name, chance):
    """Return an image of noise around a colour, as a data URI."""
    values = [chance.gauss(level, NOISE) for _ in range(SIDE * SIDE) for level in COLOURS[name]]
    image = PIL.Image.frombytes(
        "RGB", (SIDE, SIDE), bytes(min(255, max(0, round(value))) for value in values)
    )
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def write(file, count, seed, *, answered):
    """Write rows of images, with the right name as ground truth or, if answered, with a random one as the answer."""
    chance = random.Random(seed)
    with file.open("w", encoding="utf-8") as rows:
        for _ in range(count):
            name = chance.choice(list(COLOURS))
            told = {"completion": chance.choice(list(COLOURS))} if answered else {"ground_truth": name}
            rows.write(json.dumps({"prompt": QUESTION, "image": picture(name, chance), **told}) + "\n")


def main(directory):
    """Write the model, the demonstrations and the prompts below a directory."""
    (directory / "model").mkdir(parents=True)
    tokenizer = build_vision_tokenizer([QUESTION, *COLOURS] * 8)
    save_vision_model(build_vision_model(tokenizer, 0), tokenizer, directory / "model")
    write(directory / "sft.jsonl", 128, "demonstrations", answered=True)
    write(directory / "train.jsonl", 256, "train", answered=False)
    write(directory / "test.jsonl", 128, "test", answered=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
