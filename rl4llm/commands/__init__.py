"""The commands of ``rl4llm`` that belong to the library; extensions have more.

A command is a module, or an object in one, with `add(commands)`, which describes the command and its arguments. It also has
`run(arguments)`, which does the work and returns the exit code. `run` imports what is heavy, so ``rl4llm --help`` is fast. A
new command is a module and a line in the table of `rl4llm.cli`, in the manifest of an extension, or an entry point
`rl4llm.commands` of an installed package.
"""
