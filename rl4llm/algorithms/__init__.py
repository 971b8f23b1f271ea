"""Algorithms: pure maths on tensors, one page each."""

from rl4llm.algorithms.bnpo import BNPO
from rl4llm.algorithms.cispo import CISPO
from rl4llm.algorithms.dapo import DAPO
from rl4llm.algorithms.distill import Distill
from rl4llm.algorithms.dpo import DPO, OnlineDPO
from rl4llm.algorithms.dr_grpo import DrGRPO
from rl4llm.algorithms.entropy_cov import ClipCov, KLCov
from rl4llm.algorithms.explore_grpo import ExploreGRPO
from rl4llm.algorithms.gigpo import GiGPO
from rl4llm.algorithms.gmpo import GMPO
from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.gspo import GSPO, GSPOToken
from rl4llm.algorithms.kto import KTO
from rl4llm.algorithms.opmd import OPMD
from rl4llm.algorithms.ppo import PPO
from rl4llm.algorithms.registry import ALGORITHMS, register_algorithm
from rl4llm.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rl4llm.algorithms.remax import ReMax
from rl4llm.algorithms.reward_model import RewardModel
from rl4llm.algorithms.rloo import RLOO
from rl4llm.algorithms.sapo import SAPO
from rl4llm.algorithms.sft import SFT
from rl4llm.algorithms.vapo import VAPO

__all__ = [
    "ALGORITHMS",
    "BNPO",
    "CISPO",
    "DAPO",
    "Distill",
    "DPO",
    "DrGRPO",
    "ClipCov",
    "KLCov",
    "ExploreGRPO",
    "GiGPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "GSPOToken",
    "KTO",
    "OnlineDPO",
    "OPMD",
    "PPO",
    "register_algorithm",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "ReMax",
    "RewardModel",
    "RLOO",
    "SAPO",
    "SFT",
    "VAPO",
]
