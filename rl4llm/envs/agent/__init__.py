"""Black-box agents as environments: an OpenAI-compatible endpoint in front of the policy."""

from rl4llm.envs.agent.env import AgentEnv

__all__ = ["AgentEnv"]
