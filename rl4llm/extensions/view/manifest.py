"""Pages in a browser: runs, and an environment that a person plays."""

PROVIDES = {
    "rl4llm.commands": {
        "play": "rl4llm.extensions.view.play.command",
        "view": "rl4llm.extensions.view.command",
    }
}
