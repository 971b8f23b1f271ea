"""A small MCP server with a state, in plain Python so that it starts at once: python memory_server.py DIRECTORY.

It leaves an empty file in the directory, whose name is the id of its process.
"""

import json
import os
import sys
import time
from pathlib import Path

ARGUMENTS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [
    {"name": "remember", "description": "Keep a text, and return all that are kept.", "inputSchema": ARGUMENTS},
    {"name": "break", "description": "End the server, or sleep.", "inputSchema": ARGUMENTS},
    {"name": "tell", "description": "Return a text.", "inputSchema": ARGUMENTS, "outputSchema": ARGUMENTS},
]  # fmt: skip
TOLD = {"another": {"structuredContent": {"text": 1}}}
kept = []


def called(name, text):
    """Return what a tool answers."""
    if name == "break":
        time.sleep(60) if text == "sleep" else os._exit(3)
    if name == "tell":
        return {"content": [{"type": "text", "text": text}], **TOLD.get(text, {})}
    kept.append(text)
    return {"content": [{"type": "text", "text": " ".join(kept)}]}


def answer(method, params):
    """Return the result of a request; None if the method is unknown."""
    if method == "initialize":
        about = {"name": "memory", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": TOOLS}
    return called(params["name"], params["arguments"]["text"]) if method == "tools/call" else None


(Path(sys.argv[1]) / str(os.getpid())).touch()
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = answer(request["method"], request.get("params", {}))
        error = {"error": {"code": -32601, "message": "unknown method"}}
        reply = error if result is None else {"result": result}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], **reply}) + "\n")
        sys.stdout.flush()
