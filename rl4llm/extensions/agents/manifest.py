"""Agents as environments."""

PROVIDES = {
    "rl4llm.envs": {"agent": "rl4llm.extensions.agents.env:AgentEnv"},
    "rl4llm.parts": {"agent_env": "rl4llm.extensions.agents.env:AgentEnv"},
}
