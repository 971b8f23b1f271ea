"""Rewards: what an episode was worth. Each is imported on first use.

`_worker.py` and `_verify_math.py` run by path in separate processes; no module imports them.
"""

from rl4llm.core.registry import lazy
from rl4llm.core.tables import REWARDS, register_reward

_HOMES = {
    "BatchCallable": "rl4llm.rewards.callables",
    "Clip": "rl4llm.rewards.wrappers",
    "Crash": "rl4llm.rewards.pool",
    "FormatReward": "rl4llm.rewards.format",
    "Gate": "rl4llm.rewards.wrappers",
    "LengthReward": "rl4llm.rewards.length",
    "MathReward": "rl4llm.rewards.math",
    "OverlongPenalty": "rl4llm.rewards.overlong",
    "RepetitionPenalty": "rl4llm.rewards.repetition",
    "RewardFailure": "rl4llm.rewards.pool",
    "RewardLike": "rl4llm.rewards.callables",
    "Scale": "rl4llm.rewards.wrappers",
    "Scores": "rl4llm.rewards.scoring",
    "Threshold": "rl4llm.rewards.wrappers",
    "Timeout": "rl4llm.rewards.pool",
    "ToolUseReward": "rl4llm.rewards.tool_use",
    "Unavailable": "rl4llm.rewards.pool",
    "VerifierPool": "rl4llm.rewards.pool",
    "add": "rl4llm.rewards.combine",
    "as_reward_function": "rl4llm.rewards.callables",
    "check_examples": "rl4llm.rewards.scoring",
    "check_reward": "rl4llm.rewards.callables",
    "multiply": "rl4llm.rewards.combine",
    "score": "rl4llm.rewards.scoring",
    "weighted_sum": "rl4llm.rewards.combine",
}
__getattr__ = lazy(__name__, _HOMES)
__all__ = ["REWARDS", "register_reward", *_HOMES]
