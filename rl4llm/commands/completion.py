"""``rl4llm completion bash`` prints a script that completes commands, options, files and configuration keys in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from rl4llm.commands.arguments import add_command
from rl4llm.commands.output import write_text


def add(commands: Any) -> None:
    about = 'print a shell completion script; put eval "$(rl4llm completion bash)" into ~/.bashrc'
    examples = ("rl4llm completion bash", "rl4llm completion zsh", "rl4llm completion fish")
    command = add_command(commands, "completion", run, about, examples)
    command.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(arguments: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    write_text(shellcode(["rl4llm"], shell=arguments.shell))
    return 0
