"""HTTP to one server: a pool of connections, a deadline for every request, and what may pass is tried again.

    Unreachable     no answer that can be used: reset, silent, half a body, 5xx, nonsense; may pass
    NotConnected    of that kind, and certain that the server never saw the request
    Refused         the server understood and said no (4xx); asking again would not help
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
import resource
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from rl4llm.core.errors import RefusedError, UnreachableError

T = TypeVar("T")

MAY_PASS = frozenset((408, 425, 429, *range(500, 600)))
"""Status codes after which the same request may succeed."""

SHOWN = 300  # characters of a server's answer in messages
OPEN_FILES = 65536  # connections are files
KEEPALIVE_S = 4.0  # below the 5 s after which uvicorn, and with it every server here, closes an idle connection


class NotConnectedError(UnreachableError):
    """Nobody listens at the server's address, or its machine is off."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often to try, and how long to wait before the next attempt: exponential, with full jitter.

    `attempts` counts the first one too. A server's own Retry-After is honoured up to `longest_wait_s`.
    """

    attempts: int = 4
    first_wait_s: float = 0.2
    longest_wait_s: float = 10.0

    async def run(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        """The result of ``attempt(0)``, ``attempt(1)``, ...: the first that does not raise UnreachableError."""
        for number in range(self.attempts - 1):
            try:
                return await attempt(number)
            except UnreachableError as error:
                await asyncio.sleep(self.wait_s(number, error.retry_after_s))
        return await attempt(self.attempts - 1)

    def wait_s(self, number: int, asked_s: float = 0.0) -> float:
        """Seconds between attempt `number` and the next."""
        backoff_s = random.uniform(0.5, 1.0) * self.first_wait_s * 2 ** min(number, 30)
        return min(max(backoff_s, asked_s), self.longest_wait_s)


class Transport:
    """JSON requests to one server; each call is one attempt, ended by its deadline at the latest.

        transport = Transport("http://127.0.0.1:30000")
        info = await transport.get("/model_info")

    Connections are kept and shared by all requests of an event loop. At most `connections` requests are under way; the
    others wait in line, where the usual deadline has not begun. A request with a `deadline_s` of its own is an operator's,
    and waits in no line. `api_key` goes out as a bearer token, user and password of the address as basic authentication;
    none of them is in a message.
    """

    def __init__(self, base_url: str, *, deadline_s: float = 300.0, connections: int = 1024, api_key: str | None = None):
        self.base_url = base_url.rstrip("/")
        self._deadline_s = deadline_s
        self._connections = connections
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        address = URL(self.base_url)
        if address.user is not None:
            self._headers.setdefault("Authorization", aiohttp.BasicAuth(address.user, address.password or "").encode())
            self.base_url = str(address.with_user(None)).rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._before: aiohttp.ClientSession | None = None  # of connections that are not used again
        self._line = asyncio.Semaphore(connections)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self, path: str, *, deadline_s: float | None = None) -> Any:
        """The JSON that GET answers; None for an empty body."""
        return await self._request("GET", path, None, deadline_s)

    async def ping(self, path: str, *, deadline_s: float | None = None) -> None:
        """Raise unless GET succeeds; the answer need not be JSON."""
        await self._fetch("GET", path, None, deadline_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, deadline_s: float | None = None) -> Any:
        """The JSON that POST answers; None for an empty body."""
        return await self._request("POST", path, body, deadline_s)

    async def tell(self, path: str, *, deadline_s: float | None = None) -> None:
        """Raise unless POST succeeds; the answer need not be JSON."""
        await self._fetch("POST", path, None, deadline_s)

    async def knock(self, *, deadline_s: float) -> None:
        """Raise unless somebody listens; a machine that is off would be waited for as long as an answer may take."""
        address = URL(self.base_url)
        try:
            async with asyncio.timeout(deadline_s):
                _, writer = await asyncio.open_connection(address.host, address.port)
        except TimeoutError:
            raise NotConnectedError(f"A connection to {self.base_url} found nobody within {deadline_s:g} s.") from None
        except OSError as error:
            raise NotConnectedError(f"A connection to {self.base_url} found nobody: {error}.") from error
        writer.close()

    async def renew(self) -> None:
        """Use new connections from now on: a kept one may hold an answer that is not the next request's.

        What is under way on the others goes on, until the next call.
        """
        before, self._before, self._session = self._before, self._session, None
        if before is not None:
            await before.close()

    async def close(self) -> None:
        """Close all connections."""
        sessions, self._session, self._before = (self._session, self._before), None, None
        for session in sessions:
            if session is not None and self._loop is asyncio.get_running_loop():
                await session.close()

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float | None) -> Any:
        content = await self._fetch(method, path, body, deadline_s)
        return _decoded(f"{method} {self.base_url}{path}", content)

    async def _fetch(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float | None) -> bytes:
        where = f"{method} {self.base_url}{path}"
        session = await self._pool()
        line = self._line if deadline_s is None else nullcontext()
        deadline_s = deadline_s or self._deadline_s
        try:
            async with (
                line,
                asyncio.timeout(deadline_s),
                session.request(method, self.base_url + path, data=_encoded(body)) as response,
            ):
                content = await response.read()
        except TimeoutError:
            raise UnreachableError(f"{where} did not answer within {deadline_s:g} s.") from None
        except aiohttp.ClientConnectorError as error:
            raise _not_connected(where, error) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UnreachableError(f"{where} failed: {type(error).__name__}: {error}") from error
        if response.status >= 400:
            raise _refusal(where, response.status, response.headers, content)
        return content

    async def _pool(self) -> aiohttp.ClientSession:
        """The connections of the running event loop; those of a loop that is gone are forgotten."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            for session in filter(None, (self._session, self._before)):
                await session.close()
            self._session = self._before = None
            self._line = asyncio.Semaphore(self._connections)
        if self._session is None:
            _allow_open_files()
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            timeout = aiohttp.ClientTimeout(total=None)  # deadlines are those of asyncio.timeout
            headers = {"Content-Type": "application/json", **self._headers}
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
            self._loop = loop
        return self._session


def _allow_open_files() -> None:
    """Raise this process's soft limit, which is often 1024: less than one connection for each sample of a rollout."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _not_connected(where: str, error: aiohttp.ClientConnectorError) -> UnreachableError:
    """Why there is no connection: nobody listens, or this process may open no more of them, which is no server's fault."""
    if error.os_error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text = f"{where} was not sent: no more than {limit} files may be open. Next: raise `ulimit -n`."
        return UnreachableError(text, retry_after_s=1.0)
    return NotConnectedError(f"{where} found nobody: {error}.")


def _encoded(body: Mapping[str, Any] | None) -> bytes | None:
    return None if body is None else json.dumps(body, separators=(",", ":")).encode()


def _decoded(where: str, content: bytes) -> Any:
    if not content.strip():
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise UnreachableError(f"{where} answered something that is not JSON: {_shown(content)}") from None


def _refusal(where: str, status: int, headers: Mapping[str, str], content: bytes) -> RefusedError | UnreachableError:
    text = f"{where} answered {status}: {_shown(content)}"
    if status not in MAY_PASS:
        return RefusedError(text)
    try:
        retry_after_s = float(headers.get("Retry-After", 0))
    except ValueError:  # a date, which nobody sends here
        retry_after_s = 0.0
    return UnreachableError(text, retry_after_s=retry_after_s)


def _shown(content: bytes) -> str:
    text = content.decode(errors="replace").strip()
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."
