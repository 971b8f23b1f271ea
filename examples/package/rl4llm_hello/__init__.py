"""Names for rl4llm: an environment, a reward, an algorithm, an engine and a command."""
