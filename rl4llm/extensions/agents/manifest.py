"""Agents as environments."""

PROVIDES = {
    "rl4llm.envs": {"agent": "rl4llm.extensions.agents.env:AgentEnv"},
    "rl4llm.wires": {
        "responses": "rl4llm.extensions.agents.responses",
        "messages": "rl4llm.extensions.agents.messages",
    },
    "rl4llm.parts": {"agent_env": "rl4llm.extensions.agents.env:AgentEnv"},
}
