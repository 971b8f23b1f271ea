"""The tables of algorithms that `algorithm.name` may name, and of corrections for `algorithm.correction`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rl4llm.core.registry import Registry

if TYPE_CHECKING:  # reading the names does not import torch
    from torch import Tensor

    from rl4llm.core.base_algorithm import BaseAlgorithm
    from rl4llm.core.types import TrainBatch

ALGORITHMS: Registry[type[BaseAlgorithm]] = Registry(
    "algorithm.name",
    "rl4llm.core.base_algorithm:BaseAlgorithm",
    group="rl4llm.algorithms",
    table={
        "cispo": "rl4llm.algorithms.cispo:CISPO",
        "dapo": "rl4llm.algorithms.dapo:DAPO",
        "distill": "rl4llm.algorithms.distill:Distill",
        "dpo": "rl4llm.algorithms.dpo:DPO",
        "dr_grpo": "rl4llm.algorithms.dr_grpo:DrGRPO",
        "explore_grpo": "rl4llm.algorithms.explore_grpo:ExploreGRPO",
        "gigpo": "rl4llm.algorithms.gigpo:GiGPO",
        "gmpo": "rl4llm.algorithms.gmpo:GMPO",
        "grpo": "rl4llm.algorithms.grpo:GRPO",
        "gspo": "rl4llm.algorithms.gspo:GSPO",
        "gspo_token": "rl4llm.algorithms.gspo:GSPOToken",
        "kto": "rl4llm.algorithms.kto:KTO",
        "online_dpo": "rl4llm.algorithms.dpo:OnlineDPO",
        "ppo": "rl4llm.algorithms.ppo:PPO",
        "reinforce_pp": "rl4llm.algorithms.reinforce_pp:ReinforcePP",
        "reinforce_pp_baseline": "rl4llm.algorithms.reinforce_pp:ReinforcePPBaseline",
        "remax": "rl4llm.algorithms.remax:ReMax",
        "reward_model": "rl4llm.algorithms.reward_model:RewardModel",
        "rloo": "rl4llm.algorithms.rloo:RLOO",
        "sapo": "rl4llm.algorithms.sapo:SAPO",
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
