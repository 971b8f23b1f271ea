"""An OpenAI-compatible server for the tests, and a judge behind it."""

import asyncio
import contextlib
import json
import threading

from aiohttp import web

from rl4llm.extensions.judges.llm_judge import LLMJudge
from rl4llm.runtime.transport import Retry


class ChatCompletions:
    """A server whose texts, responses or JSON are made by a function of (body, number of the request)."""

    def __init__(self, reply):
        self.reply, self.bodies, self.headers = reply, [], []
        self._loop = asyncio.new_event_loop()

    async def _answer(self, request):
        body = json.loads(await request.read())
        self.headers.append(dict(request.headers))
        self.bodies.append(body)
        reply = self.reply(body, len(self.bodies))
        if isinstance(reply, web.Response):
            return reply
        if isinstance(reply, str | None):
            message = {"role": "assistant", "content": reply}
            reply = {"choices": [{"message": message}], "usage": {"total_tokens": 100}}
        return web.json_response(reply)

    async def _start(self):
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *exc):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextlib.contextmanager
def serving(make, reply, **options):
    """Yield what `make` makes with the URL of a server, and the server; requests are retried at once."""
    with ChatCompletions(reply) as server:
        client = make(url=server.url, model="model", **options)
        client.server.retry = Retry(client.server.retry.attempts, first_wait_s=0.001, longest_wait_s=0.01)
        yield client, server


def judged(reply, **options):
    return serving(LLMJudge, reply, **options)
