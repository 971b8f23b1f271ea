"""Commands that play episodes without training."""

PROVIDES = {
    "rl4llm.commands": {
        "chat": "rl4llm.extensions.evaluate.chat_command",
        "collect": "rl4llm.extensions.evaluate.collect_command",
        "eval": "rl4llm.extensions.evaluate.command",
    },
    "rl4llm.parts": {
        "conversation": "rl4llm.extensions.evaluate.chat:conversation",
        "evaluate": "rl4llm.extensions.evaluate.play:evaluate",
    },
}
