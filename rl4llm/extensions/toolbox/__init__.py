"""Tools that few runs need: the tools of an MCP server, search in a corpus, and files; each is imported on first use."""
