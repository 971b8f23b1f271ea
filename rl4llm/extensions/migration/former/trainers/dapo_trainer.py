"""Give `DAPOTrainer` the import path that it has in michaelnny/rl4llm."""

from rl4llm.core.registry import lazy

__getattr__ = lazy(__name__, {"DAPOTrainer": "rl4llm.api"})
