"""`rl4llm recipe new`: write the files of a task, and try them."""
