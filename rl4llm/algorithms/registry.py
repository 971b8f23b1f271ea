"""The table of algorithms that `algorithm.name` may name."""

from __future__ import annotations

from rl4llm.core.base_algorithm import BaseAlgorithm
from rl4llm.core.registry import Registry

ALGORITHMS: Registry[type[BaseAlgorithm]] = Registry("algorithm.name", BaseAlgorithm)
register_algorithm = ALGORITHMS.register
