"""Sums such as "12 + 7 = ?", as train.jsonl and test.jsonl: the task of `configs/recipes/sums`.

    python examples/sums.py DIRECTORY

SmolLM2-135M-Instruct solves about one in seven before training. The 128 held-out sums are never trained on.
`rl4llm recipe run sums` writes the same files.
"""

import argparse
from pathlib import Path

from rl4llm.extensions.quickstart.sums import write_sums

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    for file, rows in write_sums(parser.parse_args().directory).items():
        print(f"{file}: {rows} problems")
