"""`rl4llm new`: write the files of a task, and try them."""
