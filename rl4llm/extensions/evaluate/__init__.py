"""`rl4llm eval` measures a model on held-out prompts, and `rl4llm collect` plays episodes and stores them."""
