"""A server of the embedded engine in its own process, forked after the imports."""

import contextlib
import time
from http.client import HTTPException
from urllib.request import urlopen

from forked_python import started

from rl4llm.runtime.ports import free_port

BOOT_S = 60


@contextlib.contextmanager
def embedded_server(model, *words):
    """Start a server that computes in float32; yield its address and its process."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    flags = [model, "--port", port, "model.autocast=none", *words]
    with started("-m", "rl4llm.extensions.servers.embedded", *flags) as program:
        deadline = time.monotonic() + BOOT_S
        while not _healthy(url):
            assert program.process.is_alive() and time.monotonic() < deadline, program.err.read_text()
            time.sleep(0.05)
        yield url, program.process


def _healthy(url):
    try:
        return urlopen(f"{url}/health", timeout=5).status == 200
    except (OSError, HTTPException):
        return False
