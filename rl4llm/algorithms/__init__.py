"""Algorithms: pure maths on tensors, one page each, imported on first use."""

from rl4llm.core.registry import lazy
from rl4llm.core.tables import ALGORITHMS, register_algorithm

_HOMES = dict(path.split(":")[::-1] for path in map(ALGORITHMS.path_of, ALGORITHMS.builtin))
__getattr__ = lazy(__name__, _HOMES)
__all__ = ["ALGORITHMS", "register_algorithm", *_HOMES]
