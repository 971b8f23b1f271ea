"""Rewards: what an episode was worth. Each is imported on first use.

`_verify_math.py` runs by path in separate processes; no module imports it.
"""

from rl4llm.core.registry import lazy

__getattr__, __all__ = lazy(__name__, __file__)
