"""`rl4llm info` lists versions, devices and the names that a configuration accepts."""
