"""Rewards: what an episode was worth. Each is imported on first use.

`_worker.py` and `_verify_math.py` run by path in separate processes; no module imports them.
"""

from rl4llm.core.registry import lazy

__getattr__, __all__ = lazy(__name__, __file__)
