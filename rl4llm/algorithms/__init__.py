"""Algorithms: pure maths on tensors, one page each."""

from rl4llm.algorithms.dapo import DAPO
from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.registry import ALGORITHMS, register_algorithm
from rl4llm.algorithms.sft import SFT

__all__ = ["ALGORITHMS", "DAPO", "GRPO", "SFT", "register_algorithm"]
