"""``rl4llm chat``: talk to the model of a run, in the run's environment."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from rl4llm.commands.arguments import add_command, add_overrides
from rl4llm.commands.output import say, write_text
from rl4llm.runtime.terminal import visible

if TYPE_CHECKING:
    from rl4llm.extensions.evaluate.chat import Conversation


def add(commands: Any) -> None:
    examples = (
        "rl4llm chat runs/quickstart/grpo",
        "rl4llm chat runs/quickstart/grpo < questions.txt",
        "rl4llm chat Qwen/Qwen2.5-0.5B-Instruct eval.temperature=0.7",
    )
    about = "talk to the model of a run, with its prompt, tools and sampling; or to any model"
    command = add_command(commands, "chat", run, about, examples)
    command.add_argument(
        "model", metavar="RUN|MODEL", help="output.dir of a run, a model's directory, or a hub name"
    )
    add_overrides(
        command, "key.sub=value", "override a key, such as eval.temperature=0.7 or rollout.max_tokens=500"
    )
    command.add_argument(
        "--part", metavar="NAME", help="of several environments, the one to play (default: the first)"
    )


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.evaluate.chat import conversation

    with conversation(arguments.model, arguments.overrides, part=arguments.part) as talk:
        return max((answered(talk, line) for line in _lines()), default=0)


def answered(talk: Conversation, line: str) -> int:
    """Print the answer to a line while it is sampled; return the exit code, 1 without an answer."""
    from rl4llm.extensions.evaluate.chat import ChatError

    if line == "/reset":
        talk.reset()
        return 0
    try:
        talk.ask(line, _Printer())
    except ChatError as error:
        say(f"{error} The next line begins a new conversation.")
        return 1
    finally:
        write_text("\n")
    return 0


class _Printer:
    """Prints an answer in pieces; messages that the model did not write begin with their role."""

    def __init__(self) -> None:
        self._between = ""

    def __call__(self, role: str, text: str) -> None:
        if role:
            text = f"{self._between}{'' if role == 'assistant' else f'{role}: '}{text}"
            self._between = "\n"
        write_text(visible(text))


def _lines() -> Iterator[str]:
    """Yield the lines of standard input until its end or /quit; a terminal gets a prompt."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty():
        say("/reset begins a new conversation, and /quit or Ctrl-D ends.")
        import readline  # noqa: F401 - `input` then has a history
    while True:
        try:
            line = (input("> ") if sys.stdin.isatty() else input()).strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line:
            yield line
