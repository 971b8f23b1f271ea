"""Rewards: what an episode was worth.

Importing this package registers every reward that comes with rl4llm. `_worker.py`, `_verify_math.py` and
`_reasoning_gym.py` run in processes of their own, by path, and are imported by nobody.
"""

from rl4llm.rewards.callables import BatchCallable, RewardLike, as_reward_function
from rl4llm.rewards.code import CodeReward
from rl4llm.rewards.combine import add, multiply, weighted_sum
from rl4llm.rewards.examples import check_examples
from rl4llm.rewards.format import FormatReward
from rl4llm.rewards.judges import BaseJudge, Winner
from rl4llm.rewards.length import LengthReward
from rl4llm.rewards.math import MathReward
from rl4llm.rewards.overlong import OverlongPenalty
from rl4llm.rewards.pool import Crash, RewardFailure, Timeout, Unavailable, VerifierPool
from rl4llm.rewards.reasoning import ReasoningReward
from rl4llm.rewards.registry import REWARDS, register_reward
from rl4llm.rewards.repetition import RepetitionPenalty
from rl4llm.rewards.score import Scores, score
from rl4llm.rewards.tool_use import ToolUseReward
from rl4llm.rewards.wrappers import Clip, Gate, Scale, Threshold

__all__ = [
    "REWARDS",
    "BaseJudge",
    "BatchCallable",
    "Clip",
    "CodeReward",
    "Crash",
    "FormatReward",
    "Gate",
    "LengthReward",
    "MathReward",
    "OverlongPenalty",
    "ReasoningReward",
    "RepetitionPenalty",
    "RewardFailure",
    "RewardLike",
    "Scale",
    "Scores",
    "Threshold",
    "Timeout",
    "ToolUseReward",
    "Unavailable",
    "VerifierPool",
    "Winner",
    "add",
    "as_reward_function",
    "check_examples",
    "multiply",
    "register_reward",
    "score",
    "weighted_sum",
]
