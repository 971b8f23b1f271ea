"""rl4llm: reinforcement learning for language models in multi-turn environments."""

import os

from rl4llm.core.registry import lazy

# OpenMP reads it when torch is loaded. By default its threads spin while they wait, and starve each other when another
# process keeps a core busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
TESTED_TORCH = ("2.11", "2.13", "2.15")
"""The versions of torch that the tests run with."""
_HOMES = {
    "BaseMDPEnv": "rl4llm.core.base_env",
    "BaseOpponent": "rl4llm.core.base_opponent",
    "BaseRLTrainer": "rl4llm.trainers.base_trainer",
    "BaseRewardFunction": "rl4llm.core.base_env",
    "BaseTrainer": "rl4llm.trainers.base_trainer",
    "Batching": "rl4llm.data.pack",
    "ChatMessage": "rl4llm.core.types",
    "DAPOTrainer": "rl4llm.api",
    "DPOTrainer": "rl4llm.api",
    "DebateEnv": "rl4llm.envs.debate",
    "EnvState": "rl4llm.core.base_env",
    "GRPO": "rl4llm.algorithms.grpo",
    "GRPOTrainer": "rl4llm.api",
    "KTOTrainer": "rl4llm.api",
    "LocalClient": "rl4llm.inference.local",
    "MemoryPublisher": "rl4llm.sync.inference",
    "PPO": "rl4llm.algorithms.ppo",
    "PPOTrainer": "rl4llm.api",
    "Preparation": "rl4llm.trainers.prepare",
    "PromptStream": "rl4llm.data.prompts",
    "RLOOTrainer": "rl4llm.api",
    "RewardTrainer": "rl4llm.api",
    "RolesEnv": "rl4llm.envs.roles",
    "Rollout": "rl4llm.envs.rollout",
    "SFTTrainer": "rl4llm.api",
    "SampleState": "rl4llm.core.base_env",
    "SamplingParams": "rl4llm.core.types",
    "ToolError": "rl4llm.envs.tools.tool",
    "ToolMDPEnv": "rl4llm.envs.tool",
    "ToolSet": "rl4llm.envs.tools.tool",
    "TorchBackend": "rl4llm.backends.torch_backend",
    "load_config": "rl4llm.config",
    "load_model": "rl4llm.backends.models",
    "load_tokenizer": "rl4llm.backends.models",
    "register_algorithm": "rl4llm.core.tables",
    "register_env": "rl4llm.core.tables",
    "register_opponent": "rl4llm.core.tables",
    "register_reward": "rl4llm.core.tables",
    "register_tool": "rl4llm.core.tables",
    "tool": "rl4llm.envs.tools.tool",
}
__getattr__ = lazy(__name__, _HOMES)  # `import rl4llm` does not wait for torch
__all__ = list(_HOMES)
