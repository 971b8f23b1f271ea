"""Agents as environments."""

PROVIDES = {"rl4llm.envs": {"agent": "rl4llm.extensions.agents.env:AgentEnv"}}
