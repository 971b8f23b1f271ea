"""Commands that play episodes without training."""

PROVIDES = {
    "rl4llm.commands": {
        "collect": "rl4llm.extensions.evaluate.collect_command",
        "eval": "rl4llm.extensions.evaluate.command",
    }
}
