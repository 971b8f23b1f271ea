"""Commands that look at a setup or a run."""

PROVIDES = {
    "rl4llm.commands": {
        "check": "rl4llm.extensions.inspect.check.command",
        "grade": "rl4llm.extensions.inspect.grade.command",
        "info": "rl4llm.extensions.inspect.info.command",
        "plan": "rl4llm.extensions.inspect.plan.command",
    }
}
