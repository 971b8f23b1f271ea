"""``rl4llm info`` lists versions, devices and the names that a configuration accepts, or describes a model."""

from __future__ import annotations

import argparse
from typing import Any

from rl4llm.commands.arguments import add_command, add_json
from rl4llm.commands.output import show_facts, write_text
from rl4llm.core.errors import ConfigError

TOPICS = ("algorithms", "environments", "rewards", "engines", "backends", "devices", "model")


def add(commands: Any) -> None:
    about = "list versions, devices and the names that a configuration accepts, or describe a model"
    examples = ("rl4llm info", "rl4llm info rewards --json", "rl4llm info model Qwen/Qwen3-4B")
    command = add_command(commands, "info", run, about, examples)
    about = "show only this table, with details (default: all tables)"
    command.add_argument("topic", nargs="?", choices=TOPICS, help=about)
    command.add_argument("path", nargs="?", help="with the topic model: a model directory or hub name")
    add_json(command)
    about = 'print a completion script instead; put eval "$(rl4llm info --completion bash)" into ~/.bashrc'
    command.add_argument("--completion", choices=("bash", "zsh", "fish"), help=about)


def run(arguments: argparse.Namespace) -> int:
    if arguments.completion is not None:
        from argcomplete.shell_integration import shellcode

        write_text(shellcode(["rl4llm"], shell=arguments.completion))
        return 0
    from rl4llm.extensions.inspect.info.inventory import facts

    if (arguments.topic == "model") != (arguments.path is not None):
        raise ConfigError(
            "`rl4llm info model PATH` needs a model directory or hub name; other topics take none."
        )
    if arguments.path is not None:
        from rl4llm.extensions.inspect.info.model import facts_of

        show_facts([facts_of(arguments.path)], arguments.json)
    else:
        show_facts(facts(arguments.topic), arguments.json)
    return 0
