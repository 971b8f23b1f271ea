"""The HTTP side: verbs below /api/v1, a key, errors that the SDK shows, and polls that wait for an answer.

The SDK repeats a request without end when it gets a status of 500 or above, so an error is an answer: a status of 4xx where
the verb answers at once, and else ``{"error", "category"}`` with the status 200.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from rl4llm.core.errors import RL4LLMError
from rl4llm.envs.wire import RequestError, read_json
from rl4llm.runtime.rebinding import no_websites
from rl4llm_tinker.messages import parse
from rl4llm_tinker.requests import LONGEST_DATA, LONGEST_JSON, call
from rl4llm_tinker.service import Gone, Service

KEY_PREFIX = "tml-"
POLL_S = 30.0  # of a poll; the SDK waits 45 s
TIDY_S = 5.0
PROTOBUF = "application/x-protobuf"
SERVICE = web.AppKey("service", Service)
KEY = web.AppKey("key", str)
VERBS = (
    "create_session", "session_heartbeat", "create_model", "get_info", "optim_step", "save_weights", "load_weights",
    "save_weights_for_sampler", "create_sampling_session", "asample", "weights_info", "unload_model",
)  # fmt: skip
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger("rl4llm.tinker")


def application(service: Service, key: str) -> web.Application:
    """Return the web application; every request needs the key or, without one, any key of the right form."""
    guards = [_guarded] if key else [no_websites, _guarded]
    app = web.Application(client_max_size=LONGEST_JSON, middlewares=guards)
    app[SERVICE], app[KEY] = service, key
    app.cleanup_ctx.append(_tidying)
    for verb in VERBS:
        app.router.add_post(f"/api/v1/{verb}", _verb)
    app.router.add_post("/api/v1/forward_backward", _forward_backward)
    app.router.add_post("/api/v1/retrieve_future", _retrieve_future)
    app.router.add_post("/api/v1/sessions/{session_id}/finish", _always(service.finish))
    app.router.add_get("/api/v1/samplers/{sampler_id}", _always(service.sampler))
    app.router.add_delete("/api/v1/training_runs/{run}/checkpoints/{kind}/{name}", _delete)
    app.router.add_post("/api/v1/client/config", _always(lambda: {"pjwt_auth_enabled": False}))
    app.router.add_get("/api/v1/get_server_capabilities", _always(service.capabilities))
    app.router.add_post("/api/v1/telemetry", _always(lambda: {"status": "accepted"}))
    app.router.add_get("/api/v1/healthz", _always(lambda: {"status": "ok"}))
    return app


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    key, given = request.app[KEY], request.headers.get("X-API-Key", "")
    sent = given.encode(errors="surrogateescape")  # bytes that are not UTF-8
    if not (hmac.compare_digest(sent, key.encode()) if key else given.startswith(KEY_PREFIX)):
        accepted = "the key that it was started with" if key else f"any that begins with {KEY_PREFIX}"
        return _error(401, f"The API key is not this server's. Accepted: {accepted}, in TINKER_API_KEY.")
    answer = asyncio.ensure_future(handler(request))
    try:
        await asyncio.wait([answer])
    finally:
        answer.cancel()  # when the client has gone
    error = answer.exception()
    return answer.result() if error is None else _refusal(request.path, error)


def _refusal(path: str, error: BaseException) -> web.Response:
    """Return the answer to a request that cannot be accepted; never a status of 500, which would be asked again for ever."""
    if isinstance(error, Gone):
        return _error(410 if path.endswith(("heartbeat", "retrieve_future")) else 404, str(error))
    if isinstance(error, web.HTTPException):
        reason = "is not available on this server." if error.status == 404 else f"was refused: {error.text}"
        return _error(error.status, f"{path} {reason}")
    if isinstance(error, RL4LLMError | RequestError):
        return _error(400, str(error))
    log.error("A request failed.", exc_info=error)
    return _error(400, f"{path}: the request is not one of this protocol ({type(error).__name__}: {error}).")


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text, "detail": text, "category": "user"}, status=status)


async def _verb(request: web.Request) -> web.Response:
    """Answer a request of `VERBS`, whose name is also that of the service's method."""
    verb = request.path.rpartition("/")[2]
    answer = call(getattr(request.app[SERVICE], verb), read_json(await request.read()), verb)
    return web.json_response(await answer if inspect.isawaitable(answer) else answer)


async def _forward_backward(request: web.Request) -> web.Response:
    message = await asyncio.to_thread(parse, await request.clone(client_max_size=LONGEST_DATA).read())
    return web.json_response(request.app[SERVICE].forward_backward(message))


async def _retrieve_future(request: web.Request) -> web.Response:
    promise = call(request.app[SERVICE].promise, body := read_json(await request.read()), "retrieve_future")
    outcome = asyncio.wrap_future(promise.outcome)
    # the client gets an error, which asyncio would log if nobody took it
    outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait([outcome], timeout=POLL_S)
    if not promise.outcome.done():
        return web.json_response(
            {"type": "try_again", "request_id": body["request_id"], "queue_state": "active"}
        )
    promise.delivered_s = 0.0
    if (error := promise.outcome.exception()) is not None:
        return web.json_response(_failure(error))
    kind = PROTOBUF if promise.binary else "application/json"
    return web.Response(body=promise.outcome.result(), content_type=kind)


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, RL4LLMError):
        return {"error": str(error), "category": "user"}
    log.error("A request failed.", exc_info=error)
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}


async def _delete(request: web.Request) -> web.Response:
    """Delete a checkpoint."""
    address = "tinker://{run}/{kind}/{name}".format(**request.match_info)
    await asyncio.wrap_future(request.app[SERVICE].delete(address))
    return web.Response(status=204)


def _always(answer: Callable[..., Mapping[str, Any]]) -> Handler:
    """Return the handler of requests whose path says everything."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(answer(**request.match_info))

    return handler


async def _tidying(app: web.Application) -> AsyncIterator[None]:
    """End what belongs to clients that have disappeared, as long as the server runs."""

    async def tidy() -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            app[SERVICE].tidy()

    task = asyncio.create_task(tidy())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await asyncio.to_thread(app[SERVICE].worker.close)
