"""Pages in a browser: runs, and an environment that a person plays."""

PROVIDES = {
    "rl4llm.commands": {"view": "rl4llm.extensions.view.command"},
    "rl4llm.recipes": {"play": "rl4llm.extensions.view.play.command"},
}
