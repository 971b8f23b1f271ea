"""``rl4llm collect`` plays episodes and stores them."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_json
from rl4llm.commands.output import meanwhile, show, write_json


def add(commands: Any) -> None:
    examples = (
        "rl4llm collect configs/gsm8k_grpo.yaml --out good.jsonl --filter-reward 1",
        "rl4llm train configs/sft.yaml data.path=good.jsonl eval.every=0",
    )
    about = "play episodes and write them as a dataset, for example for sft"
    command = add_command(commands, "collect", run, about, examples)
    add_config(command)
    command.add_argument(
        "--out", required=True, type=Path, help="episodes.jsonl, episodes.parquet, or a directory"
    )
    command.add_argument(
        "--prompts",
        type=int,
        default=64,
        help="number of prompts, with rollout.group_size episodes each (default: %(default)s)",
    )
    command.add_argument(
        "--filter-reward",
        type=float,
        metavar="R",
        help="only episodes with a reward of at least R, and none with an empty reply, which sft refuses",
    )
    add_json(command)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.evaluate.episodes import check_target, write_episodes
    from rl4llm.extensions.evaluate.play import collect, load

    check_target(arguments.out)
    episodes = collect(load(arguments.config, arguments.overrides), arguments.prompts)
    with closing(episodes), meanwhile():
        written, total = write_episodes(episodes, arguments.out, arguments.filter_reward)
    if arguments.json:
        write_json({"out": str(arguments.out), "kept": written, "played": total})
    else:
        show(f"{written} of {total} episodes are in {arguments.out}")
    return 0
