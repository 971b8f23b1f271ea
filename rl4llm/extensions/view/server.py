"""The page's server: on loopback only. It reads runs, and answers the panel that talks to their models.

    GET /                                the page; its modules and styles are under /page/
    GET /api/runs                        a description of each run, and which ones are a band
    GET /api/runs/0/story                what happened, and episodes that show it
    GET /api/runs/0/metrics?from=BYTE    rows of metrics from this byte
    GET /api/runs/0/episodes?from=N&generation=G      rows of the list of episodes from row N
    GET /api/runs/0/episodes/N?generation=G           one episode, the text of its tokens and its images
    GET /api/runs/0/search?q=TEXT&generation=G        numbers of the episodes that contain the text
    POST /api/runs/0/chat  {"page": ID, "line": TEXT}  the messages that follow a line of a page; null ends the conversation

Only requests to an address are answered, see `rl4llm.runtime.rebinding`, and nothing is shared with other origins. Other
users of this machine can reach loopback too. So each start creates a token; the address contains it once, and a cookie
stores it. Without the token nobody talks to a model, whose tools run as this user. The browser sends its cookie from every
page of this machine, so a line must also come from this page: see `_asked`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from rl4llm.core.errors import RL4LLMError
from rl4llm.core.registry import load
from rl4llm.extensions.view.agent import changed_files, conversations
from rl4llm.extensions.view.bands import described
from rl4llm.extensions.view.chat import Chat
from rl4llm.extensions.view.index import COLUMNS, token_ids_of
from rl4llm.extensions.view.run import ViewedRun
from rl4llm.extensions.view.words import dicts_in
from rl4llm.runtime.rebinding import no_websites

PAGE = Path(__file__).parent / "page"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
PORTS = range(6100, 6120)
DIGEST = re.compile(r"[0-9a-f]{64}")
ROWS_AT_ONCE = 50_000
RUNS: web.AppKey[Sequence[ViewedRun]] = web.AppKey("runs")
TOKEN = web.AppKey("token", str)
CHAT = web.AppKey("chat", Chat)
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


def serve(
    runs: Sequence[ViewedRun], port: int | None, ready: Callable[[str], None], *, with_token: bool = True
) -> None:
    """Serve the page until Ctrl-C; `ready` receives its address, with the token of this start unless that is disabled.

    Without a port it uses the first free one of PORTS, with 0 any free one. Raises ViewError if the port is in use.
    """
    listener = _listen(PORTS if port is None else [port])
    token = secrets.token_urlsafe() if with_token else ""

    async def started(app: web.Application) -> None:
        ready(f"http://127.0.0.1:{listener.getsockname()[1]}/{f'?token={token}' if token else ''}")

    app = application(runs, token)
    app.on_startup.append(started)
    web.run_app(app, sock=listener, print=None, access_log=None, handle_signals=True, shutdown_timeout=1)


def application(runs: Sequence[ViewedRun], token: str = "") -> web.Application:
    """Return the web application; every request needs the token."""
    app = web.Application(middlewares=[_guard, no_websites])
    app[TOKEN] = token
    app.router.add_get("/", _page)
    app.router.add_get("/page/{name}", _page)
    app[RUNS] = tuple(runs)
    for path, answer in ANSWERS.items():
        app.router.add_get(f"/api/runs{path}", partial(_answered, answer))
    if token:
        app[CHAT] = Chat()
        app.router.add_post("/api/runs/{run}/chat", _asked)
        app.on_cleanup.append(lambda app: asyncio.to_thread(app[CHAT].close))
    return app


def rows_of(run: ViewedRun, start: int, generation: int) -> dict[str, Any]:
    """Return the list of episodes from row `start` of a generation; if the generation changed, from 0."""
    index = run.index
    index.refresh()
    reset = generation != index.generation
    start = 0 if reset else start
    rows = index.rows[start : start + ROWS_AT_ONCE]
    return {
        "columns": COLUMNS,
        "generation": index.generation,
        "reset": reset,
        "from": start,
        "rows": rows,
        "files": index.names,
        "pending": index.pending,
        "more": start + len(rows) < len(index.rows) or index.pending > 0,
    }


def episode_of(run: ViewedRun, number: int) -> dict[str, Any]:
    """Return an episode, the text of its tokens by id, what an agent did, and small copies of its images by digest."""
    episode = run.index.episode(number)
    answer: dict[str, Any] = {"episode": episode, "texts": run.texts.of(token_ids_of(episode))}
    answer["conversations"] = conversations(episode, run.texts)
    if isinstance(extras := episode.get("extras"), dict):
        answer["changes"] = changed_files(extras.get("changes"))
    if digests := digests_of(episode):
        answer["images"] = load("rl4llm.extensions.view.pictures:small_copies")(run.path / "images", digests)
    return answer


def digests_of(episode: Any) -> list[str]:
    """Return the digests of the images in an episode's messages; a run's files may hold anything."""
    messages = episode.get("messages") if isinstance(episode, dict) else None
    parts = (part for row in dicts_in(messages) for part in dicts_in(row.get("parts")))
    digests = (part.get("digest") for part in parts)
    return [digest for digest in digests if isinstance(digest, str) and DIGEST.fullmatch(digest)]


@web.middleware
async def _guard(request: web.Request, handler: Any) -> web.StreamResponse:
    if not _knows_token(request):
        text = "This page needs a token. Open the address that the command printed, with ?token=...\n"
        response: web.StreamResponse = web.Response(status=403, text=text)
    else:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=f"{error.text}\n")
        except LookupError as error:
            response = web.Response(status=404, text=f"{error.args[0] if error.args else 'not found'}\n")
    response.headers.update(HEADERS)
    return response


def _knows_token(request: web.Request) -> bool:
    """Return whether the address or the cookie of a request has the token."""
    token, texts = request.app[TOKEN], (request.query.get("token"), request.cookies.get(_cookie(request)))
    return not token or any(
        hmac.compare_digest(token.encode(), (text or "").encode(errors="replace")) for text in texts
    )


def _cookie(request: web.Request) -> str:
    """Return the name of the page's cookie, with the port: browsers send a host's cookies to all its ports."""
    transport = request.transport
    return f"rl4llm-view-{transport.get_extra_info('sockname')[1] if transport else 0}"


async def _page(request: web.Request) -> web.Response:
    name = request.match_info.get("name", "index.html")
    names = {path.name: path for path in PAGE.iterdir()}
    if name not in names:
        raise LookupError(f"{name} does not exist")
    path = names[name]
    response = web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")
    if request.app[TOKEN] and "token" in request.query:
        response.set_cookie(_cookie(request), request.app[TOKEN], httponly=True, samesite="Strict")
    return response


ANSWERS: dict[str, Callable[[web.Request], Any]] = {
    "": lambda request: [about | {"chat": CHAT in request.app} for about in described(request.app[RUNS])],
    "/{run}/story": lambda request: _run(request).story(),
    "/{run}/metrics": lambda request: _run(request).metrics(_number(request, "from")),
    "/{run}/episodes": lambda request: rows_of(
        _run(request), _number(request, "from"), _number(request, "generation")
    ),
    "/{run}/episodes/{number}": lambda request: episode_of(
        _indexed(request), int(_digits(request.match_info["number"]))
    ),
    "/{run}/search": lambda request: dict(
        zip(("numbers", "complete"), _indexed(request).index.search(request.query.get("q", "")), strict=True)
    ),
}
"""What the page asks, by the path below /api/runs."""


async def _answered(answer: Callable[[web.Request], Any], request: web.Request) -> web.Response:
    """Return an answer, which may read files, as JSON."""
    body = await asyncio.to_thread(lambda: json.dumps(answer(request)).encode("ascii"))
    return web.Response(body=body, content_type="application/json")


async def _asked(request: web.Request) -> web.Response:
    """Answer a line of the page itself: scripts of other origins can neither set this type nor choose the origin."""
    origin = request.headers.get("Origin", "")
    if request.content_type != "application/json" or urlsplit(origin).netloc != request.host:
        raise web.HTTPForbidden(text="Only this page may talk to a model.")
    chat, run = request.app[CHAT], _run(request)
    try:
        body = await request.json()
        line, page = body["line"], str(body["page"])
    except (ValueError, KeyError, TypeError) as error:
        raise web.HTTPBadRequest from error
    try:
        if line is None:
            await asyncio.to_thread(chat.close)
            return web.json_response({})
        return web.json_response(await asyncio.to_thread(chat.ask, run.path, page, str(line)))
    except (RL4LLMError, OSError) as error:
        raise web.HTTPConflict(text=str(error)) from error


def _run(request: web.Request) -> ViewedRun:
    runs = request.app[RUNS]
    number = int(_digits(request.match_info["run"]))
    if number >= len(runs):
        raise LookupError(f"run {number} does not exist")
    return runs[number]


def _number(request: web.Request, name: str) -> int:
    return int(_digits(request.query.get(name, "0")))


def _digits(text: str) -> str:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise web.HTTPBadRequest
    return text


def _indexed(request: web.Request) -> ViewedRun:
    """Return the run of a request; raise LookupError if its index has begun again since the page read it."""
    run = _run(request)
    if _number(request, "generation") != run.index.generation:
        raise LookupError("the run was resumed and its episodes were rewritten")
    return run


def _listen(ports: Sequence[int]) -> socket.socket:
    problem: Exception | None = None
    for port in ports:
        try:
            return socket.create_server(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            problem = error
    raise ViewError(
        f"--port {ports[0]} cannot be used: {str(problem).rstrip('.')}. Next: use 0 for any free one."
    )
