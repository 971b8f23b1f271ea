"""Files that run inside an inference server, with the server's Python; none of them imports rl4llm."""
