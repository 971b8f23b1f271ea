"""The server of the page in which a person plays.

GET  /            the page
GET  /api/play    what to show: the messages, whether an answer is wanted, and the rewards at the end
POST /api/start   begin an episode: {"row": 0}
POST /api/answer  the next turn: {"text": "..."}
POST /api/leave   give up the episode
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from rl4llm.extensions.view.play.person import BusyError, Game, Person
from rl4llm.extensions.view.server import guarded, json_of

GAME = web.AppKey("game", Game)
PERSON = web.AppKey("person", Person)


def application(game: Game, person: Person, token: str = "") -> web.Application:
    """Return the web application; every request needs the token."""
    app = guarded(token, start="play.html")
    app[GAME], app[PERSON] = game, person
    app.router.add_get("/api/play", _state)
    app.router.add_post("/api/start", _start)
    app.router.add_post("/api/answer", _answer)
    app.router.add_post("/api/leave", _leave)
    return app


async def _state(request: web.Request) -> web.Response:
    return await json_of(request.app[GAME].state)


async def _start(request: web.Request) -> web.Response:
    row = await _given(request, "row", int)
    return await _told(request, lambda: request.app[GAME].start(row))


async def _answer(request: web.Request) -> web.Response:
    text = await _given(request, "text", str)
    if not text.strip():
        raise web.HTTPBadRequest
    return await _told(request, lambda: request.app[PERSON].answer(text))


async def _leave(request: web.Request) -> web.Response:
    return await _told(request, request.app[PERSON].leave)


async def _told(request: web.Request, do: Callable[[], None]) -> web.Response:
    """Do something, and return the new state; 409 if it cannot be done now."""
    try:
        do()
    except BusyError as error:
        return web.Response(status=409, text=f"{error}\n")
    return await _state(request)


async def _given(request: web.Request, name: str, kind: type) -> Any:
    """Return a value of the request's JSON. Forms of other websites cannot send this content type."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType
    try:
        value = json.loads(await request.text())[name]
    except (ValueError, KeyError, TypeError):
        raise web.HTTPBadRequest from None
    if type(value) is not kind:
        raise web.HTTPBadRequest
    return value
