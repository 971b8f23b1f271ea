"""Programs that a model wrote: where they are run, and what plays and scores them."""

PROVIDES = {
    "rl4llm.envs": {"code": "rl4llm.extensions.sandbox.code_env:CodeEnv"},
    "rl4llm.rewards": {"code": "rl4llm.extensions.sandbox.code_reward:CodeReward"},
    "rl4llm.tools": {"python": "rl4llm.extensions.sandbox.python_tool:Python"},
    "rl4llm.parts": {"sandbox": "rl4llm.extensions.sandbox:Sandbox"},
}
