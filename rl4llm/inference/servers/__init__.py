"""Files that run inside an inference server, by the server's Python: none of them imports rl4llm."""
