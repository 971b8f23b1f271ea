"""Environments of other libraries."""

PROVIDES = {
    "rl4llm.envs": {
        "gymnasium": "rl4llm.extensions.adapters.gymnasium:GymnasiumEnv",
        "openenv": "rl4llm.extensions.adapters.openenv:OpenEnv",
        "reasoning_gym": "rl4llm.extensions.adapters.reasoning_gym:ReasoningGymEnv",
        "stepped": "rl4llm.extensions.adapters.stepped:SteppedEnv",
        "textarena": "rl4llm.extensions.adapters.textarena:TextArenaEnv",
        "verifiers": "rl4llm.extensions.adapters.verifiers:VerifiersEnv",
    },
    "rl4llm.rewards": {
        "env_steps": "rl4llm.extensions.adapters.step_rewards:StepRewards",
        "reasoning_gym": "rl4llm.extensions.adapters.reasoning_reward:ReasoningReward",
        "textarena": "rl4llm.extensions.adapters.textarena:TextArenaReward",
        "verifiers": "rl4llm.extensions.adapters.verifiers:VerifiersReward",
    },
}
