"""``rl4llm view``: show runs in a browser, in a file or as text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command, add_json
from rl4llm.commands.output import say, write_json
from rl4llm.core.registry import load


def add(commands: Any) -> None:
    examples = (
        "rl4llm view runs/quickstart/grpo",
        "rl4llm view runs/a runs/b",
        "rl4llm view runs --export report.html",
        "rl4llm view runs/a --terminal",
    )
    about = "show runs in a browser: curves, configurations, episodes token by token"
    command = add_command(commands, "view", run, about, examples)
    command.add_argument(
        "runs", nargs="+", metavar="RUN", help="output.dir of a run, or a directory above runs"
    )
    command.add_argument(
        "--port",
        type=int,
        help="port on 127.0.0.1; 0 for any free one (default: the first free one from 6100)",
    )
    about = "serve the page to every user of this machine, without the token that this start creates"
    command.add_argument("--no-token", action="store_true", help=about)
    instead = command.add_mutually_exclusive_group()
    instead.add_argument("--export", metavar="FILE", help="write everything into one HTML file instead")
    about = "print the main curves and a few episodes as text instead"
    instead.add_argument("--terminal", action="store_true", help=about)
    add_json(command, "print the runs as JSON instead of serving them")
    command.add_argument(
        "--episodes",
        type=int,
        default=200,
        help="most episodes of each run in FILE: some of each step, and the extremes (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.view.bands import described
    from rl4llm.extensions.view.export import export
    from rl4llm.extensions.view.run import find_runs
    from rl4llm.extensions.view.server import serve

    runs = find_runs(arguments.runs)
    if arguments.json:
        write_json(described(runs))
        return 0
    if arguments.terminal:
        load("rl4llm.extensions.view.terminal:show_runs")(runs)
        return 0
    if arguments.export is not None:
        count = export(runs, Path(arguments.export), arguments.episodes)
        say(f"{arguments.export}: {len(runs)} run(s), {count} episode(s)")
        return 0

    def ready(url: str) -> None:
        say(f"{url}  shows {', '.join(run.name for run in runs)}. Ctrl-C stops it.")

    serve(runs, arguments.port, ready, with_token=not arguments.no_token)
    return 0
