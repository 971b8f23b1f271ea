"""Tools that few runs need."""

PROVIDES = {
    "rl4llm.tools": {
        "mcp": "rl4llm.extensions.toolbox.mcp:MCP",
        "search": "rl4llm.extensions.toolbox.search:Search",
        "workspace": "rl4llm.extensions.toolbox.workspace:Workspace",
    }
}
