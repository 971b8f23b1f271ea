"""``rl4llm recipe play``: a person plays an environment in the browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command, add_config
from rl4llm.core.errors import ConfigError, RunDirError
from rl4llm.extensions.view.command import add_address, serve_page


def add(commands: Any) -> None:
    examples = (
        "rl4llm recipe play task.yaml",
        "rl4llm recipe play configs/quickstart.yaml --prompt 3",
        "rl4llm recipe play task.yaml --out good.jsonl",
    )
    about = "play an environment yourself, in the browser, in the place of the policy"
    command = add_command(commands, "play", run, about, examples)
    add_config(command)
    command.add_argument(
        "--prompt", type=int, default=0, metavar="N", help="prompt to begin with (default: %(default)s)"
    )
    about = "append finished episodes to a .jsonl file, as rows for sft"
    command.add_argument("--out", type=Path, metavar="FILE", help=about)
    add_address(command)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.compose.trainer import sampling_of, task_without_model
    from rl4llm.config import load_config
    from rl4llm.extensions.view.play.person import Game, Person
    from rl4llm.extensions.view.play.server import application

    _check_out(arguments.out)
    config = load_config(arguments.config, arguments.overrides)
    task = task_without_model(config)
    person = Person(task.env.tokenizer)
    rollout = task.rollout(client=person, seed=config.seed, max_failed_share=1.0)
    game = Game(rollout, person, sampling_of(config), arguments.out)
    try:
        try:
            game.start(arguments.prompt)
        except LookupError as error:
            raise ConfigError(f"--prompt {arguments.prompt} is not accepted. {error.args[0]}") from None
        serve_page(arguments, lambda token: application(game, person, token), f"plays {arguments.config}")
    finally:
        game.close()
    return 0


def _check_out(out: Path | None) -> None:
    """Raise an error, before anything is played, if episodes cannot be appended to the file."""
    if out is None:
        return
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out} is not accepted. Accepted: a file that ends in .jsonl.")
    try:
        out.open("a", encoding="utf-8").close()
    except OSError as error:
        raise RunDirError(f"{out} cannot be written: {error.strerror}.") from error
