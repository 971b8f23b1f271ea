"""`rl4llm export` writes the model of a run as a Hugging Face directory with a model card."""
