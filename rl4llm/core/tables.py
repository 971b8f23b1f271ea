"""The tables of names that a configuration may use, and the decorators that add to them. Reading them imports nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rl4llm.core.registry import Registry

if TYPE_CHECKING:  # reading the names does not import torch
    from pathlib import Path

    from torch import Tensor

    from rl4llm.core.base_algorithm import BaseAlgorithm
    from rl4llm.core.base_backend import BaseBackend
    from rl4llm.core.base_client import BaseClient, BasePublisher, TakesWeights
    from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction
    from rl4llm.core.base_opponent import BaseOpponent
    from rl4llm.core.types import TrainBatch

ALGORITHMS: Registry[type[BaseAlgorithm]] = Registry(
    "algorithm.name",
    "rl4llm.core.base_algorithm:BaseAlgorithm",
    group="rl4llm.algorithms",
    table={
        "bnpo": "rl4llm.algorithms.bnpo:BNPO",
        "cispo": "rl4llm.algorithms.cispo:CISPO",
        "dapo": "rl4llm.algorithms.dapo:DAPO",
        "distill": "rl4llm.algorithms.distill:Distill",
        "dpo": "rl4llm.algorithms.dpo:DPO",
        "dppo": "rl4llm.algorithms.dppo:DPPO",
        "dppo_kl": "rl4llm.algorithms.dppo:DPPOKL",
        "dr_grpo": "rl4llm.algorithms.dr_grpo:DrGRPO",
        "explore_grpo": "rl4llm.algorithms.explore_grpo:ExploreGRPO",
        "gdpo": "rl4llm.algorithms.gdpo:GDPO",
        "gigpo": "rl4llm.algorithms.gigpo:GiGPO",
        "gmpo": "rl4llm.algorithms.gmpo:GMPO",
        "grpo": "rl4llm.algorithms.grpo:GRPO",
        "gspo": "rl4llm.algorithms.gspo:GSPO",
        "gspo_token": "rl4llm.algorithms.gspo:GSPOToken",
        "kto": "rl4llm.algorithms.kto:KTO",
        "maxrl": "rl4llm.algorithms.maxrl:MaxRL",
        "online_dpo": "rl4llm.algorithms.dpo:OnlineDPO",
        "pkpo": "rl4llm.algorithms.pkpo:PKPO",
        "ppo": "rl4llm.algorithms.ppo:PPO",
        "rae": "rl4llm.algorithms.rae:RAE",
        "reinforce_pp": "rl4llm.algorithms.reinforce_pp:ReinforcePP",
        "reinforce_pp_baseline": "rl4llm.algorithms.reinforce_pp:ReinforcePPBaseline",
        "remax": "rl4llm.algorithms.remax:ReMax",
        "reward_model": "rl4llm.algorithms.reward_model:RewardModel",
        "rloo": "rl4llm.algorithms.rloo:RLOO",
        "sapo": "rl4llm.algorithms.sapo:SAPO",
        "sdft": "rl4llm.algorithms.self_distillation:SDFT",
        "sdpo": "rl4llm.algorithms.self_distillation:SDPO",
        "sft": "rl4llm.algorithms.sft:SFT",
        "vapo": "rl4llm.algorithms.vapo:VAPO",
    },
)
register_algorithm = ALGORITHMS.register

CORRECTIONS: Registry[Callable[[Tensor, TrainBatch, float, float], Tensor]] = Registry(
    "algorithm.correction",
    table={
        "geometric_clip": "rl4llm.algorithms.correction:geometric_clip",
        "geometric_icepop": "rl4llm.algorithms.correction:geometric_icepop",
        "geometric_mask": "rl4llm.algorithms.correction:geometric_mask",
        "geometric_mask_is": "rl4llm.algorithms.correction:geometric_mask_is",
        "icepop": "rl4llm.algorithms.correction:icepop",
        "is": "rl4llm.algorithms.correction:importance",
        "sequence_icepop": "rl4llm.algorithms.correction:sequence_icepop",
        "sequence_mask": "rl4llm.algorithms.correction:sequence_mask",
        "sequence_tis": "rl4llm.algorithms.correction:sequence_truncated",
        "tis": "rl4llm.algorithms.correction:truncated",
        "token_mask": "rl4llm.algorithms.correction:token_mask",
    },
)
"""(log w (B, T), batch, low, high) -> weight of each token's loss (B, T)."""

ENVIRONMENTS: Registry[type[BaseMDPEnv]] = Registry(
    "env.name",
    "rl4llm.core.base_env:BaseMDPEnv",
    group="rl4llm.envs",
    table={
        "chat": "rl4llm.envs.chat:ChatEnv",
        "debate": "rl4llm.envs.debate:DebateEnv",
        "math": "rl4llm.envs.chat:ChatEnv",
        "roles": "rl4llm.envs.roles:RolesEnv",
        "tool": "rl4llm.envs.tool:ToolMDPEnv",
    },
)
register_env = ENVIRONMENTS.register

REWARDS: Registry[type[BaseRewardFunction] | Callable[..., Any]] = Registry(
    "rewards.name",
    group="rl4llm.rewards",
    table={
        "clip": "rl4llm.rewards.wrappers:Clip",
        "format": "rl4llm.rewards.format:FormatReward",
        "gate": "rl4llm.rewards.wrappers:Gate",
        "length": "rl4llm.rewards.length:LengthReward",
        "math": "rl4llm.rewards.math:MathReward",
        "overlong": "rl4llm.rewards.overlong:OverlongPenalty",
        "repetition": "rl4llm.rewards.repetition:RepetitionPenalty",
        "scale": "rl4llm.rewards.wrappers:Scale",
        "threshold": "rl4llm.rewards.wrappers:Threshold",
        "tool_use": "rl4llm.rewards.tool_use:ToolUseReward",
    },
    extras={"compute_score": "compat"},
)
"""Subclasses of BaseRewardFunction, and plain functions ``f(completions, **columns) -> list[float]``."""

register_reward = REWARDS.register
"""``@register_reward("name")`` on a class or function makes it available to configurations under that name, plain
``@register_reward`` under the name of the class or function."""

TOOLS: Registry[Callable[..., Any]] = Registry(
    "env.tools", group="rl4llm.tools", table={"calculator": "rl4llm.envs.tools.calculate:calculator"}
)
register_tool = TOOLS.register

OPPONENTS: Registry[Callable[..., BaseOpponent]] = Registry("env.opponents.name", group="rl4llm.opponents")
"""Those that a configuration may name; ``package.module:function`` is a function of the messages that returns the line."""

register_opponent = OPPONENTS.register
"""``@register_opponent("name")`` on a class makes it available to configurations under that name."""

GENERATED: Registry[Callable[..., list[dict[str, Any]]]] = Registry("data.path", group="rl4llm.tasks")
"""Tasks that `data.path` may name instead of a file."""

DIRECTORIES: Registry[Callable[[Path], Iterable[tuple[str, Any]]]] = Registry(
    "data.path", group="rl4llm.directories"
)
"""Readers of directories whose rows are directories themselves, by the name of the file that each of those has."""

BACKENDS: Registry[type[BaseBackend]] = Registry(
    "backend.name",
    "rl4llm.core.base_backend:BaseBackend",
    group="rl4llm.backends",
    table={"torch": "rl4llm.backends.torch_backend:TorchBackend"},
)
ENGINES: Registry[type[BaseClient]] = Registry(
    "inference.name",
    "rl4llm.core.base_client:BaseClient",
    group="rl4llm.engines",
    table={"local": "rl4llm.inference.local:LocalClient"},
)
PUBLISHERS: Registry[Callable[[TakesWeights, Callable[[], Any], Any], BasePublisher]] = Registry(
    "sync.name", group="rl4llm.publishers", table={"memory": "rl4llm.sync.inference:in_memory"}
)
"""Functions that make a publisher from a client, a function that makes the store of versions, and the tokenizer."""
