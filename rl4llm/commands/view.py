"""``rl4llm view``: look at runs in a browser."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command, add_json
from rl4llm.commands.output import say, write_json
from rl4llm.core.errors import ConfigError


def add(commands: Any) -> None:
    examples = (
        "rl4llm view runs/quickstart/grpo",
        "rl4llm view runs/a runs/b --open",
        "rl4llm view runs --export report.html",
    )
    about = "look at runs in a browser: curves, configurations, episodes token by token"
    command = add_command(commands, "view", run, about, examples)
    command.add_argument("runs", nargs="+", metavar="RUN", help="output.dir of a run, or a directory of runs")
    command.add_argument("--port", type=int, help="of 127.0.0.1; 0 is any free one (default: the first free one from 6100)")
    command.add_argument("--open", action="store_true", help="open the page in the browser")
    command.add_argument("--export", metavar="FILE", help="write all of it into one HTML file instead")
    add_json(command, "print which runs there are, as JSON, instead of serving them")
    command.add_argument("--episodes", type=int, default=200, help="of each run in FILE, the newest (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.view import export, find_runs, serve

    runs = find_runs(arguments.runs)
    if arguments.episodes < 0:
        raise ConfigError(f"--episodes {arguments.episodes} is not accepted: 0 or above.")
    if arguments.json:
        write_json([run.about() for run in runs])
        return 0
    if arguments.export is not None:
        count = export(runs, Path(arguments.export), arguments.episodes)
        say(f"{arguments.export}: {len(runs)} run(s), {count} episode(s)")
        return 0

    def ready(url: str) -> None:
        say(f"{url}  shows {', '.join(run.name for run in runs)}; Ctrl-C ends it")
        if arguments.open and not webbrowser.open(url):
            say("No browser can be opened from here. Open the address yourself.")

    serve(runs, arguments.port, ready)
    return 0
