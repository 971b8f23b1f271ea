"""``rl4llm replay``: recompute a step that was not finite."""
