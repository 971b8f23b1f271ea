"""``rl4llm grade``: what the math reward extracts from answers, and how it scores them."""
