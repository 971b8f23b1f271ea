"""The commands of ``rl4llm``, one small module each.

A module has `add(commands)`, which describes the command and its arguments, and `run(arguments)`, which does it and returns
the exit code. What is heavy is imported within `run`, so that ``rl4llm --help`` waits for nothing. A new command is a module
here and its name in the list of `rl4llm.cli`.
"""
