"""gRPC only: serve the service of `environments.proto`, and call it."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from rl4llm.core.errors import ConfigError, EnvError, RL4LLMError
from rl4llm.core.message import shortened
from rl4llm.extensions.remote.token import token_of_start
from rl4llm.extensions.remote.wire import MAX_MESSAGE_BYTES, MESSAGES, PACKAGE, SERVICE

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise it prints a line for each connection that ends
import grpc
import grpc.aio

PING_EVERY_MS, PING_TIMEOUT_MS = 20_000, 10_000
WRITE_FAILED = (
    "Internal error from Core"  # gRPC's only message for writing to a call that the other side ended
)
TRAILER_CHARS = 1500  # of an error's text, which is sent in a header of at most 8 KB
BOTH_SIDES = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", PING_EVERY_MS),  # detects a peer that disappeared
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_SIDE = (
    ("grpc.so_reuseport", 0),  # otherwise two hosts could share a port, and each would get some of the calls
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_EVERY_MS // 2),
)
CLIENT_SIDE = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
FINAL = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
)
HOSTS_FAULT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.RESOURCE_EXHAUSTED)


class LostError(EnvError):
    """A host disappeared, was restarted or did not respond in time; another host, or the same a little later, may."""


class Server:
    """Serves an object with the methods `hello`, `prompts`, `open` and `play` of the protocol.

    Port 0 selects a free one, which is in `port`.

    Args:
        token: the token that callers must send; "" for none.
        certificate: the files of a certificate and its key; without them the connection is not encrypted.
    """

    def __init__(
        self,
        behaviour: Any,
        host: str,
        port: int,
        token: str = "",
        certificate: tuple[Path, Path] | None = None,
    ):
        self._server = grpc.aio.server(options=(*BOTH_SIDES, *SERVER_SIDE))
        self._handlers = _Guarded(_handlers(behaviour), token)
        self._server.add_generic_rpc_handlers((self._handlers,))
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if certificate is None:
            self.port = self._server.add_insecure_port(where)
        else:
            chain, key = (file.read_bytes() for file in certificate)
            self.port = self._server.add_secure_port(where, grpc.ssl_server_credentials([(key, chain)]))
        self.start, self.stop = self._server.start, self._server.stop


class HostChannel:
    """A host as its callers see it. Every call has a deadline, and its errors name the host and the action.

    The connection is encrypted if an `authority` is given, a file with the certificate that verifies the host's. Raises
    ConfigError for a final refusal, LostError if the host is not available, EnvError for an error on the host.
    """

    def __init__(self, address: str, token: str = "", authority: Path | None = None):
        self.address, self._token = address, token
        options = (*BOTH_SIDES, *CLIENT_SIDE)
        if authority is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            credentials = grpc.ssl_channel_credentials(authority.read_bytes())
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        token = self._token or token_of_start(self.address)  # a restarted host has a new one
        return (("authorization", f"Bearer {token}"),) if token else ()

    async def ask(self, method: str, request: Any, timeout_s: float, doing: str) -> Any:
        """Return the answer of a call with one answer."""
        call = self._call(method, self._channel.unary_unary)
        try:
            return await call(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self.error(error.code(), error.details(), doing) from None

    async def stream(self, method: str, request: Any, timeout_s: float, doing: str) -> AsyncIterator[Any]:
        """Yield the answers of a call with many."""
        try:
            call = self._call(method, self._channel.unary_stream)(
                request, metadata=self._metadata, timeout=timeout_s
            )
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise self.error(error.code(), error.details(), doing) from None

    def talk(self, method: str) -> Talk:
        """Return a call in which both sides send messages."""
        return Talk(self, self._call(method, self._channel.stream_stream)(metadata=self._metadata))

    def hold(self, method: str, request: Any) -> Talk:
        """Return a call in which only the host sends more messages, for as long as it lasts."""
        return Talk(self, self._call(method, self._channel.unary_stream)(request, metadata=self._metadata))

    async def close(self) -> None:
        await self._channel.close()

    def _call(self, method: str, kind: Callable[..., Any]) -> Any:
        described = SERVICE.methods_by_name[method]
        return kind(
            f"/{SERVICE.full_name}/{method}",
            request_serializer=_message(described.input_type).SerializeToString,
            response_deserializer=_message(described.output_type).FromString,
        )

    def error(self, code: grpc.StatusCode, details: str | None, doing: str) -> RL4LLMError:
        """Return the error to raise for a call that ended with this status."""
        text = f"env host {self.address}, while {doing}: {details or code.name}"
        if code in FINAL:
            return ConfigError(text)
        if code in HOSTS_FAULT:
            return EnvError(text)
        return LostError(f"{text} ({code.name})")


class Talk:
    """A call that stays open; it must be ended."""

    def __init__(self, channel: HostChannel, call: Any):
        self._channel, self._call = channel, call

    async def say(self, message: Any, timeout_s: float, doing: str) -> None:
        """Send a message. Raises LostError if the host has ended the call, since gRPC does not report why."""
        await self._within(self._call.write(message), timeout_s, doing)

    async def hear(self, timeout_s: float | None, doing: str) -> Any:
        """Return the next answer. Raises LostError also if the host closes the call instead."""
        answer = await self._within(self._call.read(), timeout_s, doing)
        if answer is grpc.aio.EOF:
            raise self._lost(doing, "it closed the call")
        return answer

    def end(self) -> None:
        """Disconnect; the host notices at once."""
        self._call.cancel()

    async def _within(self, speaking: Any, timeout_s: float | None, doing: str) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await speaking
        except TimeoutError:
            raise self._lost(doing, f"no answer in {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            if error.details() == WRITE_FAILED:
                raise self._lost(doing, "it ended the call") from None
            raise self._channel.error(error.code(), error.details(), doing) from None
        except (grpc.aio.UsageError, asyncio.InvalidStateError):
            raise self._lost(doing, "the call is over") from None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            # this task was not cancelled, so gRPC reports that another task of ours ended the call
            raise self._lost(doing, "the trainer ended the call") from None

    def _lost(self, doing: str, why: str) -> LostError:
        return LostError(f"env host {self._channel.address}, while {doing}: {why}")


def _message(described: Any) -> Any:
    return MESSAGES[described.full_name.removeprefix(f"{PACKAGE}.")]


class _Guarded(grpc.GenericRpcHandler):
    """The handlers of the service for callers with its token; others are refused before any of their messages is read.

    gRPC reads the first message of a call before it calls a handler, except for streams. So a stream handler refuses.
    """

    def __init__(self, handlers: Mapping[str, Any], token: str):
        self._handlers = {f"/{SERVICE.full_name}/{name}": handler for name, handler in handlers.items()}
        self._token = token

    def service(self, details: Any) -> Any:
        handler = self._handlers.get(details.method)
        sent = str(dict(details.invocation_metadata or ()).get("authorization", ""))
        if not self._token or hmac.compare_digest(sent.encode(), f"Bearer {self._token}".encode()):
            return handler
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_requests: Any, context: Any) -> None:
    text = "the trainer's token is missing or wrong. Set RL4LLM_ENV_TOKEN or RL4LLM_ENV_TOKEN_FILE to the host's."
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)


def _handlers(behaviour: Any) -> dict[str, Any]:
    kinds = {
        (False, False): (grpc.unary_unary_rpc_method_handler, _answering),
        (False, True): (grpc.unary_stream_rpc_method_handler, _streaming),
        (True, True): (grpc.stream_stream_rpc_method_handler, _streaming),
    }
    handlers = {}
    for method in SERVICE.methods:
        handler, wrapped = kinds[method.client_streaming, method.server_streaming]
        handlers[method.name] = handler(
            wrapped(getattr(behaviour, method.name.lower())),
            request_deserializer=_message(method.input_type).FromString,
            response_serializer=_message(method.output_type).SerializeToString,
        )
    return handlers


def _answering(behave: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Any, context: Any) -> Any:
        async with _reported(context):
            return await behave(request)

    return handle


def _streaming(behave: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(requests: Any, context: Any) -> AsyncIterator[Any]:
        async with _reported(context), aclosing(behave(requests)) as answers:
            async for answer in answers:
                yield answer

    return handle


@asynccontextmanager
async def _reported(context: Any) -> AsyncIterator[None]:
    """End the call with the text of an error; gRPC reports others to the caller, and prints the traceback here."""
    try:
        yield
    except RL4LLMError as error:
        lost = isinstance(error, LostError)
        code = grpc.StatusCode.NOT_FOUND if lost else grpc.StatusCode.INVALID_ARGUMENT
        await context.abort(code, shortened(str(error), TRAILER_CHARS))
