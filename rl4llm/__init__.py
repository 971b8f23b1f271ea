"""rl4llm: reinforcement learning for language models in multi-turn environments."""

import os

from rl4llm.core.registry import lazy

# libgomp reads them when torch is loaded. Its threads spin for milliseconds by default, and starve each other where another
# process keeps a core busy. Without any spinning, each barrier between two short operations puts a core to sleep.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}

__version__ = "0.1.0"
TESTED_TORCH = ("2.11", "2.13", "2.15")
"""The versions of torch that the tests run with."""
__getattr__, __all__ = lazy(__name__, __file__)  # `import rl4llm` does not wait for torch
