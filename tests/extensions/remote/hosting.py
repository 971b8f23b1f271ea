"""Hosts of environments in threads of the tests' process, over real gRPC: started at once, and gone at once."""

import asyncio
import threading

from rl4llm.extensions.remote.host import EnvHost
from rl4llm.extensions.remote.rpc import Server
from rl4llm.extensions.sandbox import Sandbox


class HostThread:
    """`rl4llm serve env --env NAMES`, in a thread."""

    def __init__(self, names, port=0, token="", change=lambda env_host: None, certificate=None):
        self.said = []
        self.env_host = EnvHost(names, lambda: Sandbox("rlimits", allow_weak=True), self.said.append)
        change(self.env_host)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = self._do(self._start(port, token, certificate))
        self.address = f"127.0.0.1:{self.server.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Hang up on everybody at once."""
        if self.loop.is_running():
            self._do(self.server.stop(0))
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()

    def _do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    async def _start(self, port, token, certificate):
        server = Server(self.env_host, "127.0.0.1", port, token, certificate)
        await server.start()
        return server


def played_on(host):
    """The number of episodes of the environments that are open on a host."""
    return sum(hosted.played for hosted in host.env_host._hosted.values())
