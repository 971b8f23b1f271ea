"""rl4llm: reinforcement learning for language models in multi-turn environments."""

import os

from rl4llm.core.registry import lazy

# OpenMP reads it when torch is loaded. By default its threads spin while they wait, and starve each other when another
# process keeps a core busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
TESTED_TORCH = ("2.11", "2.13", "2.15")
"""The versions of torch that the tests run with."""
__getattr__, __all__ = lazy(__name__, __file__)  # `import rl4llm` does not wait for torch
