"""gRPC, and nothing else: the service of `environments.proto` served, and asked."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from rl4llm.core.errors import ConfigError, EnvError, RL4LLMError
from rl4llm.envs.remote.wire import MAX_MESSAGE_BYTES, MESSAGES, PACKAGE, SERVICE

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it would print a line for each connection that ends
try:
    import grpc
    import grpc.aio
except ImportError as error:
    raise ConfigError("Environments on other machines need the package grpcio: pip install 'rl4llm[remote]'.") from error

PING_EVERY_MS, PING_TIMEOUT_MS = 20_000, 10_000
WRITE_FAILED = "Internal error from Core"  # all that gRPC says when it writes into a call that the other side ended
TRAILER_CHARS = 1500  # of an error's text: it travels in a header, which may have 8 KB
BOTH_SIDES = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", PING_EVERY_MS),  # a peer that is gone without a word is noticed
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_SIDE = (
    ("grpc.so_reuseport", 0),  # two hosts on one port would each get some of the calls
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
    """A host went away, or did not answer in time; another one, or the same a little later, may."""


class NotFoundError(RL4LLMError):
    """A caller names what this host does not have, perhaps because it was started again."""


class Server:
    """Serves an object with the methods `hello`, `prompts`, `open` and `play`, as the protocol has them.

    Port 0 takes a free one; `port` tells which. Raises ConfigError for an address that cannot be listened on.
    """

    def __init__(self, behaviour: Any, host: str, port: int, token: str = ""):
        self._server = grpc.aio.server(options=(*BOTH_SIDES, *SERVER_SIDE))
        handlers = _handlers(behaviour, token)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(where)
        except RuntimeError as error:
            raise ConfigError(f"Nobody can listen on {where}: it is taken, or no address of this machine.") from error

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and end those that there are after `grace_s`."""
        await self._server.stop(grace_s)


class Channel:
    """A host as its callers see it. Every call has a deadline, and its errors name the host and what was being done.

    Raises ConfigError for what the host refuses for good, LostError when it is not there, EnvError when it broke.
    """

    def __init__(self, address: str, token: str = ""):
        self.address = address
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = grpc.aio.insecure_channel(address, options=(*BOTH_SIDES, *CLIENT_SIDE))

    async def ask(self, method: str, request: Any, timeout_s: float, doing: str) -> Any:
        """The answer of a call that has one."""
        call = self._call(method, self._channel.unary_unary)
        try:
            return await call(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self.error(error.code(), error.details(), doing) from None

    async def stream(self, method: str, request: Any, timeout_s: float, doing: str) -> AsyncIterator[Any]:
        """The answers of a call that has many."""
        try:
            call = self._call(method, self._channel.unary_stream)(request, metadata=self._metadata, timeout=timeout_s)
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise self.error(error.code(), error.details(), doing) from None

    def talk(self, method: str) -> Talk:
        """A call in which both sides speak."""
        return Talk(self, self._call(method, self._channel.stream_stream)(metadata=self._metadata))

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
        """What a call that ended with this status raises."""
        text = f"env host {self.address}, while it {doing}: {details or code.name}"
        if code in FINAL:
            return ConfigError(text)
        if code in HOSTS_FAULT:
            return EnvError(text)
        return LostError(f"{text} ({code.name})")


class Talk:
    """One call in which both sides speak; it must be ended."""

    def __init__(self, channel: Channel, call: Any):
        self._channel, self._call = channel, call

    async def say(self, message: Any, timeout_s: float, doing: str) -> None:
        """Send a message. Where the host ended the call meanwhile, gRPC does not tell why, and this is a LostError."""
        await self._within(self._call.write(message), timeout_s, doing)

    async def hear(self, timeout_s: float | None, doing: str) -> Any:
        """The next answer; LostError also when the host closes the call instead."""
        answer = await self._within(self._call.read(), timeout_s, doing)
        if answer is grpc.aio.EOF:
            raise LostError(f"env host {self._channel.address}, while it {doing}: it closed the call")
        return answer

    def end(self) -> None:
        """Hang up; the host notices at once."""
        self._call.cancel()

    async def _within(self, speaking: Any, timeout_s: float | None, doing: str) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await speaking
        except TimeoutError:
            raise LostError(f"env host {self._channel.address}, while it {doing}: no answer in {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            if error.details() == WRITE_FAILED:
                raise LostError(f"env host {self._channel.address}, while it {doing}: it ended the call") from None
            raise self._channel.error(error.code(), error.details(), doing) from None
        except (grpc.aio.UsageError, asyncio.InvalidStateError):
            raise LostError(f"env host {self._channel.address}, while it {doing}: the call is over") from None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            # nobody cancelled this task: so gRPC says that the call was ended on our side, by another task
            raise LostError(f"env host {self._channel.address}, while it {doing}: the call was ended here") from None


def _message(described: Any) -> Any:
    return MESSAGES[described.full_name.removeprefix(f"{PACKAGE}.")]


def _handlers(behaviour: Any, token: str) -> dict[str, Any]:
    kinds = {
        (False, False): (grpc.unary_unary_rpc_method_handler, _answering),
        (False, True): (grpc.unary_stream_rpc_method_handler, _streaming),
        (True, True): (grpc.stream_stream_rpc_method_handler, _streaming),
    }
    handlers = {}
    for method in SERVICE.methods:
        handler, wrapped = kinds[method.client_streaming, method.server_streaming]
        handlers[method.name] = handler(
            wrapped(getattr(behaviour, method.name.lower()), token),
            request_deserializer=_message(method.input_type).FromString,
            response_serializer=_message(method.output_type).SerializeToString,
        )
    return handlers


def _answering(behave: Callable[..., Any], token: str) -> Callable[..., Any]:
    async def handle(request: Any, context: Any) -> Any:
        await _check_token(context, token)
        try:
            return await behave(request)
        except RL4LLMError as error:  # of others gRPC tells the caller, and prints the traceback here
            await _abort(context, error)

    return handle


def _streaming(behave: Callable[..., Any], token: str) -> Callable[..., Any]:
    async def handle(requests: Any, context: Any) -> AsyncIterator[Any]:
        await _check_token(context, token)
        try:
            async with aclosing(behave(requests)) as answers:
                async for answer in answers:
                    yield answer
        except RL4LLMError as error:  # of others gRPC tells the caller, and prints the traceback here
            await _abort(context, error)

    return handle


async def _check_token(context: Any, token: str) -> None:
    given = dict(context.invocation_metadata() or ()).get("authorization", "")
    if token and not hmac.compare_digest(str(given).encode(), f"Bearer {token}".encode()):
        wrong = "has another token than this host" if given else "has no token, and this host wants one"
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            f"the trainer {wrong}. Set RL4LLM_ENV_TOKEN, or RL4LLM_ENV_TOKEN_FILE, to the same on both.",
        )


async def _abort(context: Any, error: RL4LLMError) -> None:
    code = grpc.StatusCode.NOT_FOUND if isinstance(error, NotFoundError) else grpc.StatusCode.INVALID_ARGUMENT
    text = str(error)
    if len(text) > TRAILER_CHARS:
        text = f"{text[:TRAILER_CHARS]} ..."
    await context.abort(code, text.encode(errors="replace").decode())
