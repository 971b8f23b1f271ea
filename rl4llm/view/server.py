"""The page's server: loopback only, and it only ever reads.

    GET /                                the page, its modules and styles under /page/
    GET /api/runs                        what each run is
    GET /api/runs/0/metrics?from=BYTE    rows of metrics from there on
    GET /api/runs/0/episodes?from=N&generation=G      rows of the list of episodes from there on
    GET /api/runs/0/episodes/N?generation=G           one episode and the text of its tokens
    GET /api/runs/0/search?q=TEXT&generation=G        numbers of the episodes in which it was said

Any website can send a browser to loopback, under a name of its own that resolves there; so the Host header must be a
loopback address, and nothing is shared with other origins.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from rl4llm.core.errors import RL4LLMError
from rl4llm.view.index import COLUMNS, token_ids_of
from rl4llm.view.run import ViewedRun

PAGE = Path(__file__).parent / "page"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
PORTS = range(6100, 6120)
ROWS_AT_ONCE = 50_000
RUNS = web.AppKey("runs", tuple)
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class ViewError(RL4LLMError):
    """The page cannot be served."""


def serve(runs: Sequence[ViewedRun], port: int | None, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `ready` is told its address. No port is the first free one of PORTS, 0 any free one.

    Raises ViewError when the port is taken.
    """
    listener = _listen(PORTS if port is None else [port])

    async def started(app: web.Application) -> None:
        ready(f"http://127.0.0.1:{listener.getsockname()[1]}/")

    app = application(runs)
    app.on_startup.append(started)
    web.run_app(app, sock=listener, print=None, access_log=None, handle_signals=True, shutdown_timeout=1)


def application(runs: Sequence[ViewedRun]) -> web.Application:
    """All that is served."""
    app = web.Application(middlewares=[_guard])
    app[RUNS] = tuple(runs)
    app.router.add_get("/", _page)
    app.router.add_get("/page/{name}", _page)
    app.router.add_get("/api/runs", _about)
    app.router.add_get("/api/runs/{run}/metrics", _metrics)
    app.router.add_get("/api/runs/{run}/episodes", _rows)
    app.router.add_get("/api/runs/{run}/episodes/{number}", _episode)
    app.router.add_get("/api/runs/{run}/search", _search)
    return app


def rows_of(run: ViewedRun, start: int, generation: int) -> dict[str, Any]:
    """The list of episodes from row `start` of a generation on; of another one all of it, from 0."""
    index = run.index
    index.refresh()
    anew = generation != index.generation
    start = 0 if anew else start
    rows = index.rows[start : start + ROWS_AT_ONCE]
    more = start + len(rows) < len(index.rows)
    return {
        "columns": COLUMNS,
        "generation": index.generation,
        "anew": anew,
        "from": start,
        "rows": rows,
        "files": index.names,
        "pending": index.pending,
        "more": more or index.pending > 0,
    }


def episode_of(run: ViewedRun, number: int) -> dict[str, Any]:
    """An episode, and the text of its tokens by id."""
    episode = run.index.episode(number)
    return {"episode": episode, "texts": run.texts.of(token_ids_of(episode))}


@web.middleware
async def _guard(request: web.Request, handler: Any) -> web.StreamResponse:
    host = request.headers.get("Host", "").lower()
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name not in LOOPBACK:
        response: web.StreamResponse = web.Response(
            status=403, text=f"This page is only given to {', '.join(LOOPBACK)}, not to {host!r}.\n"
        )
    else:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=f"{error.status}: {error.reason}\n")
        except LookupError as error:
            response = web.Response(status=404, text=f"{error.args[0] if error.args else 'not found'}\n")
    response.headers.update(HEADERS)
    return response


async def _page(request: web.Request) -> web.Response:
    name = request.match_info.get("name", "index.html")
    names = {path.name: path for path in PAGE.iterdir()}
    if name not in names:
        raise LookupError(f"there is no {name}")
    path = names[name]
    return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")


async def _about(request: web.Request) -> web.Response:
    return await _json(lambda: [run.about() for run in request.app[RUNS]])


async def _metrics(request: web.Request) -> web.Response:
    run, start = _run(request), _number(request, "from")
    return await _json(lambda: run.metrics(start))


async def _rows(request: web.Request) -> web.Response:
    run, start, generation = _run(request), _number(request, "from"), _number(request, "generation")
    return await _json(lambda: rows_of(run, start, generation))


async def _episode(request: web.Request) -> web.Response:
    run, number = _run(request), int(_digits(request.match_info["number"]))
    _check_generation(request, run)
    return await _json(lambda: episode_of(run, number))


async def _search(request: web.Request) -> web.Response:
    run, text = _run(request), request.query.get("q", "")
    _check_generation(request, run)

    def search() -> dict[str, Any]:
        numbers, complete = run.index.search(text)
        return {"numbers": numbers, "complete": complete}

    return await _json(search)


async def _json(make: Callable[[], Any]) -> web.Response:
    """What `make` returns, which may read files."""

    def body() -> bytes:
        return json.dumps(make()).encode("ascii")

    return web.Response(body=await asyncio.to_thread(body), content_type="application/json")


def _run(request: web.Request) -> ViewedRun:
    runs = request.app[RUNS]
    number = int(_digits(request.match_info["run"]))
    if number >= len(runs):
        raise LookupError(f"there is no run {number}")
    return runs[number]


def _number(request: web.Request, name: str) -> int:
    return int(_digits(request.query.get(name, "0")))


def _digits(text: str) -> str:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise web.HTTPBadRequest
    return text


def _check_generation(request: web.Request, run: ViewedRun) -> None:
    if _number(request, "generation") != run.index.generation:
        raise LookupError("the run was resumed and its episodes were written anew")


def _listen(ports: Sequence[int]) -> socket.socket:
    problem: Exception | None = None
    for port in ports:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen()
            return listener
        except (OSError, OverflowError) as error:
            listener.close()
            problem = error
    given = f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
    why = str(problem).rstrip(".")
    raise ViewError(f"--port {given} cannot be used: {why}. Next: another one, or --port 0 for any that is free.")
