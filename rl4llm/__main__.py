"""``python -m rl4llm`` is the command line."""

from rl4llm.cli import console_script

console_script()
