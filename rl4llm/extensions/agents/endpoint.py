"""A server in front of the policy, for the agents of one process: the APIs of `WIRES`, and `/v1/models`.

Each episode has a separate secret. A request carries it in its path, http://127.0.0.1:PORT/SECRET/v1, or as its API
key. The server listens on loopback only, and every error is a JSON object of the request's API.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from rl4llm.envs.wire import (
    MODEL,
    TOO_DEEP,
    WIRES,
    Answer,
    Asked,
    RequestError,
    dumps,
    error_of,
    read_json,
    wire_of,
)
from rl4llm.extensions.agents import responses
from rl4llm.extensions.agents.history import Entry
from rl4llm.extensions.agents.session import AgentSession

HOST = "127.0.0.1"
SOCKET = "policy"
MAX_BODY = 64 * 1024**2  # bytes
BACKLOG = 1024  # connections that may wait: all agents of a rollout connect at once
logger = logging.getLogger("rl4llm.agents")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _OneLine(logging.LoggerAdapter[logging.Logger]):
    """Logs the error of a request, such as malformed HTTP, as one line without a traceback."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        error = kwargs.pop("exc_info", None)
        return (f"{msg} ({type(error).__name__})" if isinstance(error, Exception) else msg), kwargs


class AgentEndpoint:
    """Serves any number of sessions in the running event loop, from the first use to the end of the last.

    `slots`, if any, are the processes of agents that may run at once. `unenforced` is that of `AgentEnv`.
    """

    def __init__(self, slots: int | None = None, unenforced: Collection[str] = ()) -> None:
        self.slots = asyncio.Semaphore(slots) if slots else None
        self._unenforced = unenforced
        self.users = 0
        self._starting: asyncio.Task[None] | None = None
        self._sessions: dict[str, AgentSession] = {}
        self._ended: set[str] = set()
        self._runner: web.AppRunner | None = None
        self._at: dict[str, str] = {}  # keys by the paths of sockets
        self._port = 0

    @asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        """Listen at least for as long as this takes."""
        self.users += 1
        try:
            if self._starting is None:
                self._starting = asyncio.ensure_future(self._start())
            await asyncio.shield(self._starting)
            yield
        finally:
            self.users -= 1
            if not self.users and self._runner is not None:
                await self._runner.cleanup()

    async def _start(self) -> None:
        """Listen on a free port."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._errors_as_json])
        for start in ("/v1", "/{key}/v1", "/{key}/v1/v1"):  # some SDKs add /v1 to their base URL
            for name in WIRES:
                app.router.add_post(f"{start}/{name}", self._complete)
            app.router.add_post(f"{start}/messages/count_tokens", self._count)
            app.router.add_get(f"{start}/responses/{{answer}}", self._retrieve)
            app.router.add_get(f"{start}/models", self._models)
            app.router.add_get(f"{start}/models/{{model}}", self._models)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None, logger=_OneLine(logger)
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0, backlog=BACKLOG).start()
        self._port = self._runner.addresses[0][1]

    def open(self, session: AgentSession) -> str:
        """Start to answer a session's requests, and return their base URL."""
        self._sessions[session.key] = session
        return f"http://{HOST}:{self._port}/{session.key}/v1"

    @asynccontextmanager
    async def socket(self, session: AgentSession) -> AsyncIterator[str]:
        """Answer a session's requests, and no others, at a Unix socket of this path too."""
        with tempfile.TemporaryDirectory(prefix="rl4llm-agent-") as directory:
            path = f"{directory}/{SOCKET}"
            assert self._runner is not None  # it is used
            site = web.UnixSite(self._runner, path)
            await site.start()
            self._at[path] = session.key
            try:
                yield path
            finally:
                del self._at[path]
                await site.stop()

    async def close(self, session: AgentSession) -> None:
        """Refuse the session's requests from now on."""
        self._ended.add(session.key)
        self._sessions.pop(session.key, None)
        await session.close()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        with session.serving():
            session.check_open()
            asked, answer, entry = await self._answered(request, session)
            try:
                return await _sent(request, asked, answer)
            except BaseException as error:
                # the agent never acts on this answer; mostly it has disconnected
                session.history.take_back(entry)
                if not isinstance(error, OSError | asyncio.CancelledError):
                    session.broke(error)
                raise

    async def _answered(self, request: web.Request, session: AgentSession) -> tuple[Asked, Answer, Entry]:
        body: Any = None
        try:
            body = await _body(request, session)
            asked = self._asked(request, session, body)
            answer, entry = await session.answer(asked)
        except RequestError as error:
            session.note_refusal(body, error)
            raise
        except RecursionError as error:
            refusal = RequestError(TOO_DEEP)
            session.note_refusal(body, refusal)
            raise refusal from error
        except web.HTTPException:
            raise
        except Exception as error:
            session.broke(error)  # the episode raises it again, which stops the run
            raise RequestError(f"{type(error).__name__}: {error}", status=500) from error
        session.note_answer(body)
        return asked, answer, entry

    def _asked(self, request: web.Request, session: AgentSession, body: Any) -> Asked:
        return wire_of(request.path).read_request(body, session.params, session.kept, self._unenforced)

    async def _count(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        limit = session.ran_into
        try:
            asked = self._asked(request, session, await _body(request, session))
            return _json({"input_tokens": session.count(asked)})
        finally:
            session.ran_into = limit  # a count ends nothing

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        stored = self._session(request).stored.get(request.match_info["answer"].removeprefix("resp_"))
        if stored is None:
            raise RequestError("No stored answer of this episode has this id.", status=404)
        return _json(responses.answer_body(*stored))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {
            "id": request.match_info.get("model", MODEL),
            "object": "model",
            "created": 0,
            "owned_by": "rl4llm",
            "max_model_len": self._session(request).context_length,
        }
        one = "model" in request.match_info
        return _json(model if one else {"object": "list", "data": [model]})

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except (RequestError, RecursionError) as error:
            return _json(*error_of(error, request.method, request.path))
        except web.HTTPException as error:
            if error.status in (404, 405):
                error.text = f"This server has /v1/models, /v1/{', /v1/'.join(WIRES)}"
                session = self._sessions.get(request.path.split("/")[1])
                if session and request.method == "POST" and "/v1/" in request.path:
                    session.note_refusal(
                        None, RequestError(f"{request.path[-100:]}: {error.text}")
                    )  # a wire not read
            return _json(*error_of(error, request.method, request.path))

    def _session(self, request: web.Request) -> AgentSession:
        """Return the session named by the path or by the API key; if both name an episode, they must agree."""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = request.headers.get("x-api-key", bearer).strip()
        named = request.match_info.get("key", key)
        known = self._sessions.keys() | self._ended
        if named not in known:
            problem = (
                "The path does not name an episode"
                if "key" in request.match_info
                else "The API key does not belong to an episode"
            )
            raise RequestError(
                f"{problem}; use the base URL and key that the agent received.",
                status=401,
                code="invalid_api_key",
            )
        here = request.transport.get_extra_info("sockname") if request.transport else None
        if isinstance(here, str) and self._at.get(here) != named:
            raise RequestError("The key belongs to another episode.", status=401, code="invalid_api_key")
        if key != named and key in known:
            raise RequestError("The API key belongs to another episode.", status=401, code="invalid_api_key")
        if named in self._ended:
            raise RequestError(
                "This episode is over and accepts no more requests.", status=410, code="episode_over"
            )
        return self._sessions[named]


async def _body(request: web.Request, session: AgentSession) -> Any:
    """Return the JSON of a request, unless it is longer than the context."""
    try:
        content = await request.read()
    except web.HTTPRequestEntityTooLarge:
        session.ran_into = "context"
        raise
    session.check_size(session.dialects.least_tokens(content))
    body = read_json(content)
    for name in ("messages", "input", "tools") if isinstance(body, dict) else ():
        session.check_size(len(body[name]) if isinstance(body.get(name), list) else 0)
    return body


async def _sent(request: web.Request, asked: Asked, answer: Answer) -> web.StreamResponse:
    """Write the response, and return it when all of it has been written."""
    if asked.stream:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        for event in wire_of(request.path).events(asked, answer):
            await response.write(event.encode())
    else:
        response = _json(wire_of(request.path).answer_body(asked, answer))
        await response.prepare(request)
    await response.write_eof()
    return response


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=dumps(body).encode(), status=status, content_type="application/json")
