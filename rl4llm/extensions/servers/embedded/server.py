"""The HTTP server in front of the embedded engine: SGLang's native requests and OpenAI's, with one task per request.

POST /generate                    exact tokens in; tokens, log-probs and the version of the weights of each token out
POST /update_weights_from_disk    take a version that a trainer published; requests under way continue with it
POST /pause_generation            {"mode": "retract"} lets requests wait, {"mode": "abort"} ends them; with "in_place" they
                                  wait and keep their cache when new weights arrive
POST /continue_generation, /abort_request, /flush_cache, /weights_checker
GET  /health, /model_info, /server_info, /v1/models, /v1/models/{model}
POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, /v1/completions
"""

from __future__ import annotations

import asyncio
import hmac
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web

from rl4llm.core.base_backend import AUTOCAST
from rl4llm.core.errors import EngineError, ModelError, RefusedError, WeightsError
from rl4llm.core.images import ImagePlace, tower_of
from rl4llm.core.registry import load
from rl4llm.core.weights import WeightRef
from rl4llm.envs.wire import WIRES, RequestError, Wire, dumps, error_of, read_json, wire_of
from rl4llm.extensions.servers.embedded.native import (
    NativeRequest,
    completion_body,
    object_of,
    read_native,
    scores_body,
    version_text,
)
from rl4llm.extensions.servers.embedded.openai import OpenAIEndpoints
from rl4llm.extensions.servers.embedded.weights import checksum, read_weights
from rl4llm.inference.local import LocalClient
from rl4llm.runtime.rebinding import no_websites
from rl4llm.runtime.terminal import visible
from rl4llm.runtime.threads import in_own_thread

MAX_BODY = 256 * 1024**2  # bytes
PAUSED_S = 20.0  # for which a health check waits for a server that is paused
MODES = ("retract", "in_place", "abort")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EmbeddedServer:
    """Serves one model. `name` is what the command line called it, and `path` is its directory."""

    def __init__(self, model: Any, tokenizer: Any, engine: LocalClient, name: str, path: str, key: str = ""):
        self._model, self._engine, self._path, self._key = model, engine, path, key
        tower = tower_of(model)
        self._vision = None if tower is None else tower.vision
        self._openai = OpenAIEndpoints(engine, tokenizer, name, self._vision)
        self._running = asyncio.Event()
        self._running.set()
        self._keeps_cache = False
        self._weights = asyncio.Lock()  # held while they change or are read
        self._updating = False  # requests resume at its end
        self._under_way: set[str] = set()
        self._answers = 0

    def application(self) -> web.Application:
        """Return the web application. `WIRES` has OpenAI's chat and, by an extension, /v1/responses and /v1/messages."""
        guards = [self._answered] if self._key else [self._answered, no_websites]
        app = web.Application(client_max_size=self._largest_body(), middlewares=guards)
        answers = {
            "GET /health": self._health,
            "GET /model_info": self._model_info,
            "GET /server_info": self._server_info,
            "GET /v1/models": self._models,
            "POST /generate": self._generate,
            "POST /tokenize": self._openai.tokenize,
            "POST /update_weights_from_disk": self._update_weights,
            "POST /pause_generation": self._pause,
            "POST /continue_generation": self._continue,
            "POST /abort_request": self._abort,
            "POST /flush_cache": self._flush,
            "POST /weights_checker": self._checksum,
        }
        for route, answer in answers.items():
            method, path = route.split()
            app.router.add_route(method, path, partial(self._answer, answer))
        app.router.add_get(
            "/v1/models/{model:.+}", self._described
        )  # /v1/models/{model}: a name may be a path
        for path in WIRES:
            app.router.add_post(f"/v1/{path}", partial(self._answer_openai, self._openai.chat))
            app.router.add_post(f"/v1/{path}/count_tokens", self._count)
        app.router.add_post("/v1/completions", partial(self._answer_openai, self._openai.text))
        return app

    def _largest_body(self) -> int:
        """Return the bytes of the longest text that fits the context, with 1 MiB for what is around it, or of images."""
        characters = self._openai.dialects.longest_token * self._engine.context_length  # up to 12 bytes each
        return MAX_BODY if self._vision is not None else min(12 * characters + 1024**2, MAX_BODY)

    async def _answer(self, answer: Callable[[Any], Awaitable[Any]], request: web.Request) -> web.Response:
        return _json(await answer(await self._body(request)))

    async def _body(self, request: web.Request) -> Any:
        content = await request.read()
        self._openai.check_size(self._openai.dialects.least_tokens(content))
        return read_json(content) if content.strip() else {}

    async def _generate(self, body: Any) -> Any:
        answer = await self._native(read_native(body))
        self._answers += 1
        return answer

    async def _native(self, asked: NativeRequest) -> dict[str, Any]:
        images = () if asked.images is None else await self._images(asked)
        if asked.scores:
            async with self._weights:
                scores, tops = await self._engine.score_top(asked.token_ids, asked.top, images)
                return scores_body(asked, scores, tops, await self._engine.version())
        async with self._named(asked.id):
            completion = await self._engine.generate(
                asked.token_ids, asked.params, session=asked.id, images=images
            )
        return completion_body(asked, completion)

    async def _images(self, asked: NativeRequest) -> Sequence[ImagePlace]:
        if self._vision is None:
            raise RequestError("Start the server with model.vision=frozen.", param="images")
        reader = load("rl4llm.extensions.servers.embedded.images:read_images")
        places: Sequence[ImagePlace] = await in_own_thread(
            "rl4llm-images", partial(reader, self._vision, asked.images, len(asked.token_ids))
        )
        return places

    @asynccontextmanager
    async def _named(self, name: str) -> AsyncIterator[None]:
        """Register a request by its id, by which it can be aborted."""
        if name in self._under_way:
            raise RequestError(f"Duplicate request ID: {name}", param="rid")
        self._under_way.add(name)
        try:
            yield
        finally:
            self._under_way.discard(name)
            await self._engine.release(name)

    async def _update_weights(self, body: Any) -> Any:
        update = object_of(body)
        path, version = str(update.get("model_path")), str(update.get("weight_version"))
        autocast = update.get("autocast")  # of the trainer, whose log-probs are compared with the engine's
        if not re.fullmatch("[0-9]{1,18}", version) or autocast not in (None, *AUTOCAST):
            raise RequestError(
                f"weight_version={version!r:.99} or autocast={autocast!r:.99} is not accepted."
            )
        # A trainer that disconnects does not leave half of it undone.
        return await asyncio.shield(asyncio.ensure_future(self._update(path, int(version), autocast)))

    async def _update(self, path: str, version: int, autocast: str | None) -> Any:
        started = time.monotonic()
        async with self._weights:
            self._updating = True
            await self._engine.pause()
            try:
                tensors = await in_own_thread(
                    "rl4llm-weights", partial(read_weights, path, version, self._model)
                )
                reference = WeightRef(version, tensors=lambda: iter(tensors.items()))
                if autocast is not None:
                    await self._engine.compute_in(autocast)
                await self._engine.load(reference, self._keeps_cache)
            except (WeightsError, ModelError, OSError) as error:
                current = version_text(await self._engine.version())
                raise RequestError(f"The server keeps version {current} of the weights. {error}") from error
            finally:
                self._updating = False
                if self._running.is_set():
                    await self._engine.resume()
        took_s = time.monotonic() - started
        tell(f"Holds version {version} of the weights, from {path}, after {took_s:.2f} s.")
        return {"success": True, "message": f"Version {version} was loaded in {took_s:.2f} s."}

    async def _checksum(self, body: Any) -> Any:
        """Answer with a checksum of the weights, as SGLang's `/weights_checker` does."""
        async with self._weights:
            digest = await in_own_thread("rl4llm-checksum", partial(checksum, self._model))
        return {"success": True, "per_engine_checksum": digest}

    async def _pause(self, body: Any) -> Any:
        mode = object_of(body).get("mode", "retract")
        if mode not in MODES:
            raise RequestError(f"mode={mode!r:.100} must be one of {', '.join(MODES)}.", param="mode")
        self._running.clear()
        self._keeps_cache = mode == "in_place"
        await self._engine.pause()
        if mode == "abort":
            await self._engine.abort()
        return {"status": "ok"}

    async def _continue(self, body: Any) -> Any:
        """Resume requests that were paused."""
        self._running.set()
        self._keeps_cache = False
        if not self._updating:
            await self._engine.resume()
        return {"status": "ok"}

    async def _abort(self, body: Any) -> Any:
        fields = object_of(body)
        if fields.get("abort_all"):
            await self._engine.abort()
        elif fields.get("rid") in list(self._under_way):  # whatever type it has
            await self._engine.abort(fields["rid"])
        return {"status": "ok"}

    async def _flush(self, body: Any) -> Any:
        """Do nothing: no cache outlives its request."""
        return {"status": "ok"}

    async def _health(self, body: Any) -> Any:
        try:
            async with asyncio.timeout(PAUSED_S):
                await self._running.wait()
        except TimeoutError:
            raise RequestError("The server is paused; POST /continue_generation.", status=503) from None
        return await self._engine.health()

    async def _model_info(self, body: Any) -> Any:
        return {"model_path": self._path, "weight_version": version_text(await self._engine.version())}

    async def _server_info(self, body: Any) -> Any:
        """Answer with the model, the device, and what the engine does now."""
        device = str(self._engine.device.type)
        info = {**await self._model_info(body), "device": device, "tp_size": 1, "answers": self._answers}
        return {**info, **await self._engine.health()}

    async def _models(self, body: Any) -> Any:
        return {"object": "list", "data": [self._openai.model()]}

    async def _described(self, request: web.Request) -> web.StreamResponse:
        name, model = request.match_info["model"], self._openai.model()
        if name != model["id"]:
            raise RequestError(f"The model {name!r:.100} is not served here.", status=404)
        return _json(model)

    async def _count(self, request: web.Request) -> web.StreamResponse:
        count = await self._openai.count(await self._body(request), wire_of(request.path))
        return _json({"input_tokens": count})

    async def _answer_openai(
        self, read: Callable[[Any, Wire], Awaitable[Any]], request: web.Request
    ) -> web.StreamResponse:
        """Answer a request of an API, as a stream if it asks for one."""
        job = await read(await self._body(request), wire_of(request.path))
        if not job.stream:
            return _json(await self._openai.answer(job))
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        async for event in self._openai.events(job):
            await response.write(event.encode())
        await response.write_eof()
        return response

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and answer every error as a JSON object like OpenAI's."""
        try:
            self._check_key(request)
            return await handler(request)
        except (RequestError, RecursionError, web.HTTPException) as error:
            return _json(*error_of(error, request.method, request.path))
        except (EngineError, MemoryError, RuntimeError) as error:
            refusal = RequestError(str(error), status=400 if isinstance(error, RefusedError) else 500)
            return _json(*error_of(refusal, request.method, request.path))

    def _check_key(self, request: web.Request) -> None:
        header = request.headers.get("x-api-key", request.headers.get("Authorization", ""))
        key = header.removeprefix("Bearer ").strip().encode(errors="replace")
        same = hmac.compare_digest(key, self._key.encode())
        if self._key and request.path != "/health" and not same:
            raise RequestError("The API key is missing or wrong.", status=401, code="invalid_api_key")
        # as forms of websites send
        if request.method == "POST" and request.content_type != "application/json":
            raise RequestError("Content-Type must be application/json.", status=415)


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(
        body=dumps(body).encode(errors="replace"), status=status, content_type="application/json"
    )


def tell(text: str) -> None:
    """Print a line into the server's log at once."""
    sys.stdout.write(visible(text) + "\n")
    sys.stdout.flush()
