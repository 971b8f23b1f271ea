"""``rl4llm recipe``: ways to start something, by the word that follows; extensions bring them."""

from __future__ import annotations

from typing import Any

from rl4llm.commands.arguments import add_registered
from rl4llm.core.registry import Registry

ACTIONS: Registry[Any] = Registry("rl4llm recipe", group="rl4llm.recipes")
"""Each is a module with `add`, as a command is."""


def add(commands: Any) -> None:
    about = "start something: repeat a run with published results, write a task, or play one yourself"
    command = commands.add_parser("recipe", help=about, description=f"{about[0].upper()}{about[1:]}.")
    actions = command.add_subparsers(required=True, metavar="ACTION", parser_class=type(command))
    add_registered(actions, ACTIONS)
