"""Requests with one instruction that a program can check, and the reward that checks it.

    python configs/recipes/instructions/instructions.py DIRECTORY

The file writes train.jsonl and test.jsonl. The topics of the held-out requests occur in no request of the training set.
"""

import json
import random
import re
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

from rl4llm import BaseRewardFunction

HELD_OUT = 128
WORDS = 5  # of a reply, at least
HELD_OUT_TOPICS = 6
TOPICS = """the sea, a cat, winter, bread, trains, the moon, a garden, rain, music, bicycles, tea, mountains, a library,
bees, chess, a river, pizza, robots, autumn, the sun, dogs, paper, a bridge, football, honey, a lighthouse, snow, the desert,
coffee, birds"""
REQUESTS = ("Describe {}.", "Tell me about {}.", "Say something about {}.")


def bullets(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) == 3 and all(line.startswith("- ") for line in lines)


def three_sentences(text: str) -> bool:
    return len(re.findall(r"[.!?](?:\s|$)", text)) == 3 and text[-1] in ".!?"


def title_and_text(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() == {"title", "text"}


INSTRUCTIONS: dict[str, Callable[[str], bool]] = {
    "Use only lowercase letters.": str.islower,
    "Use only CAPITAL LETTERS.": str.isupper,
    "Use no commas.": lambda text: "," not in text,
    "Use at most ten words.": lambda text: len(text.split()) <= 10,
    "Write exactly three sentences.": three_sentences,
    "Write exactly three lines, each beginning with '- '.": bullets,
    "End with the words: That is all.": lambda text: text.endswith("That is all."),
    "Put the whole answer in double quotes.": lambda text: len(text) > 2 and text[0] == text[-1] == '"',
    'Answer with a JSON object with the keys "title" and "text".': title_and_text,
}


class Follows(BaseRewardFunction):
    """1 if the reply follows the instruction and names the topic, in five words or more, 0 if not."""

    success_at = 1.0

    def __init__(self, name: str = "follows"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **columns) -> float:
        text = messages[-1].content.strip()
        says = columns["topic"].split()[-1] in text.lower() and len(text.split()) >= WORDS
        return float(says and INSTRUCTIONS[ground_truth](text))


def rows(topics):
    """Return all requests about these topics, in a fixed random order."""
    found = [
        {"question": f"{request.format(topic)} {instruction}", "answer": instruction, "topic": topic}
        for topic, request, instruction in product(topics, REQUESTS, INSTRUCTIONS)
    ]
    random.Random(0).shuffle(found)
    return found


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    topics = [topic.strip() for topic in TOPICS.split(",")]
    splits = {"test": rows(topics[:HELD_OUT_TOPICS])[:HELD_OUT], "train": rows(topics[HELD_OUT_TOPICS:])}
    for name, part in splits.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
