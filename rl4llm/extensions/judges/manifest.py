"""Language models that score or oppose the policy."""

PROVIDES = {
    "rl4llm.opponents": {
        "model": "rl4llm.extensions.judges.opponent:opponent_model",
        "server": "rl4llm.extensions.judges.opponent:ServerOpponent",
    },
    "rl4llm.rewards": {
        "llm_judge": "rl4llm.extensions.judges.llm_judge:LLMJudge",
        "reward_model": "rl4llm.extensions.judges.reward_model:LearnedReward",
        "rubric": "rl4llm.extensions.judges.rubric:Rubric",
        "winner": "rl4llm.extensions.judges.judges:Winner",
    },
}
