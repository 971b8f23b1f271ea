"""The command that converts configurations, rewards of other projects, and answers to their keys and names."""

PROVIDES = {
    "rl4llm.commands": {"import": "rl4llm.extensions.migration.command"},
    "rl4llm.rewards": {"compute_score": "rl4llm.extensions.migration.rewards:ComputeScore"},
    "rl4llm.parts": {
        "answer_key": "rl4llm.extensions.migration.answers:of_key",
        "answer_name": "rl4llm.extensions.migration.names:of_name",
    },
}
