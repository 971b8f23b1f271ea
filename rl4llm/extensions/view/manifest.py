"""Pages in a browser: runs, and an environment that a person plays; runs in a notebook."""

PROVIDES = {
    "rl4llm.commands": {"view": "rl4llm.extensions.view.command"},
    "rl4llm.recipes": {"play": "rl4llm.extensions.view.play.command"},
    "rl4llm.parts": {
        "notebook_console": "rl4llm.extensions.view.notebook:NotebookConsole",
        "notebook_page": "rl4llm.extensions.view.notebook:NotebookPage",
    },
}
