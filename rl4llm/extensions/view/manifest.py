"""Runs as pages in a browser and in a notebook."""

PROVIDES = {
    "rl4llm.commands": {"view": "rl4llm.extensions.view.command"},
    "rl4llm.parts": {
        "notebook_console": "rl4llm.extensions.view.notebook:NotebookConsole",
        "notebook_page": "rl4llm.extensions.view.notebook:NotebookPage",
    },
}
