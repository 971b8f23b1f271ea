"""``rl4llm hello``: a command is a module with `add`, which describes it; nothing heavy is imported before it runs."""

from rl4llm.commands.arguments import add_command
from rl4llm.commands.output import show


def add(commands):
    command = add_command(
        commands, "hello", run, "greet somebody", ("rl4llm hello", "rl4llm hello --name Ann")
    )
    command.add_argument("--name", default="world", help="who is greeted (default: %(default)s)")


def run(arguments):
    show(f"Hello, {arguments.name}.")
    return 0
