"""rl4llm: reinforcement learning for language models in multi-turn environments."""

import os

from rl4llm.core.registry import lazy

# OpenMP reads it when torch is loaded. By default its threads spin while they wait, and starve each other when another
# process keeps a core busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
TESTED_TORCH = ("2.11", "2.13", "2.15")
"""The versions of torch that the tests run with."""
__path__.append(
    f"{__path__[0]}/extensions/migration/former"
)  # modules that michaelnny/rl4llm has, such as logging
_HOMES = {
    "BaseJudge": "rl4llm.extensions.judges.judges",
    "BaseMDPEnv": "rl4llm.core.base_env",
    "BaseOpponent": "rl4llm.core.base_opponent",
    "BaseRLTrainer": "rl4llm.core.base_trainer",
    "BaseReward": "rl4llm.extensions.migration.rewards",
    "BaseRewardFunction": "rl4llm.core.base_env",
    "BaseTrainer": "rl4llm.core.base_trainer",
    "Batching": "rl4llm.data.pack",
    "ChatMessage": "rl4llm.core.types",
    "CodeEnv": "rl4llm.extensions.sandbox.code_env",
    "DAPOTrainer": "rl4llm.api",
    "DPOConfig": "rl4llm.extensions.trl.arguments",
    "DPOTrainer": "rl4llm.api",
    "DatasetMixtureConfig": "rl4llm.extensions.trl.parser",
    "DebateEnv": "rl4llm.envs.debate",
    "EnvState": "rl4llm.core.base_env",
    "FilesystemPublisher": "rl4llm.extensions.servers.sync.filesystem",
    "GRPO": "rl4llm.algorithms.grpo",
    "GRPOConfig": "rl4llm.extensions.trl.arguments",
    "GRPOTrainer": "rl4llm.api",
    "KTOConfig": "rl4llm.extensions.trl.arguments",
    "KTOTrainer": "rl4llm.api",
    "LocalClient": "rl4llm.inference.local",
    "MemoryPublisher": "rl4llm.sync.memory",
    "ModelConfig": "rl4llm.extensions.trl.parser",
    "PPO": "rl4llm.algorithms.ppo",
    "PPOTrainer": "rl4llm.api",
    "Preparation": "rl4llm.trainers.prepare",
    "PromptStream": "rl4llm.data.prompts",
    "RLOOConfig": "rl4llm.extensions.trl.arguments",
    "RLOOTrainer": "rl4llm.api",
    "RewardConfig": "rl4llm.extensions.trl.arguments",
    "RewardTrainer": "rl4llm.api",
    "RolesEnv": "rl4llm.envs.roles",
    "Rollout": "rl4llm.envs.rollout",
    "SFTConfig": "rl4llm.extensions.trl.arguments",
    "SFTTrainer": "rl4llm.api",
    "SGLangClient": "rl4llm.extensions.servers.clients.sglang",
    "SampleState": "rl4llm.core.base_env",
    "SamplingParams": "rl4llm.core.types",
    "ToolError": "rl4llm.envs.tools.tool",
    "ToolMDPEnv": "rl4llm.envs.tool",
    "ToolSet": "rl4llm.envs.tools.tool",
    "ScriptArguments": "rl4llm.extensions.trl.parser",
    "TorchBackend": "rl4llm.backends.torch_backend",
    "TrlParser": "rl4llm.extensions.trl.parser",
    "WeightStore": "rl4llm.extensions.servers.sync.store",
    "get_dataset": "rl4llm.extensions.trl.parser",
    "get_kbit_device_map": "rl4llm.extensions.trl.parser",
    "get_peft_config": "rl4llm.extensions.trl.parser",
    "get_quantization_config": "rl4llm.extensions.trl.parser",
    "load_config": "rl4llm.config",
    "load_model": "rl4llm.backends.models",
    "load_tokenizer": "rl4llm.backends.models",
    "register_algorithm": "rl4llm.algorithms.registry",
    "register_env": "rl4llm.envs.registry",
    "register_opponent": "rl4llm.core.base_opponent",
    "register_reward": "rl4llm.rewards.registry",
    "register_tool": "rl4llm.envs.tools.registry",
    "tool": "rl4llm.envs.tools.tool",
}
__getattr__ = lazy(__name__, _HOMES)  # `import rl4llm` does not wait for torch
__all__ = list(_HOMES)
