"""Pairs of a right and a wrong answer to the same prompt, out of episodes that `rl4llm collect` wrote.

    python configs/recipes/preferences/pairs.py EPISODES DIRECTORY

A prompt has at most four pairs, so that easy ones do not outnumber the others.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

PAIRS = 4

if __name__ == "__main__":
    episodes, directory = map(Path, sys.argv[1:])
    answers = defaultdict(lambda: ({}, {}))  # of a prompt: wrong ones, right ones; each text once
    for line in episodes.read_text().splitlines():
        episode = json.loads(line)
        *prompt, answer = episode["messages"]
        answers[json.dumps(prompt)][episode["reward"] == 1][answer["content"]] = answer
    pairs = [
        {"prompt": json.loads(prompt), "chosen": [right], "rejected": [wrong]}
        for prompt, (wrongs, rights) in answers.items()
        for wrong, right in list(zip(wrongs.values(), rights.values(), strict=False))[:PAIRS]
    ]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
