"""The page's real server, in a thread."""

import asyncio
import http.client
import json
import threading
from contextlib import contextmanager
from urllib.parse import urlsplit

from aiohttp import web

from rl4llm.extensions.view.run import find_runs
from rl4llm.extensions.view.server import application


def served(*paths, token=""):
    """The address of the page of these runs, without its token."""
    return hosting(application(find_runs(paths), token))


@contextmanager
def hosting(app):
    """The address of an application's page."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []

    async def start():
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.extend([runner, f"http://127.0.0.1:{runner.addresses[0][1]}/"])
        ready.set()

    def run():
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(found[0].cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(60)
        yield found[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def request(url, path, method="GET", body=None, **headers):
    """Status, headers and body of an answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        connection.request(method, path, body, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def get(url, path):
    """The JSON of an answer."""
    status, _, body = request(url, path)
    assert status == 200, body
    return json.loads(body)
