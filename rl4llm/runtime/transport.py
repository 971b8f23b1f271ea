"""HTTP to one server: a pool of connections, a deadline for every request, and retries of temporary errors.

Unreachable     no usable answer: connection reset, no response, incomplete body, 5xx, not JSON; may be temporary
NotConnected    an Unreachable for which the server certainly never saw the request
Refused         the server refused the request (4xx) or sends it elsewhere (3xx); a retry would not help
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
from rl4llm.core.message import shortened

T = TypeVar("T")

MAY_PASS = frozenset((408, 425, 429, *range(500, 600)))
"""Status codes of temporary errors."""

SHOWN = 300  # characters of a server's answer in messages
OPEN_FILES = 65536  # each connection is an open file
# less than the 5 s after that uvicorn, which all these servers use, closes idle connections
KEEPALIVE_S = 4.0


class NotConnectedError(UnreachableError):
    """No server listens at the address, or its machine is off."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often to try, and how long to wait before the next attempt: exponential, with full jitter.

    `attempts` includes the first one. A server's Retry-After is respected up to `longest_wait_s`.
    """

    attempts: int = 4
    first_wait_s: float = 0.2
    longest_wait_s: float = 10.0

    async def run(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        """Return the result of ``attempt(0)``, ``attempt(1)``, ...: the first that does not raise UnreachableError."""
        for number in range(self.attempts - 1):
            try:
                return await attempt(number)
            except UnreachableError as error:
                await asyncio.sleep(self.wait_s(number, error.retry_after_s))
        return await attempt(self.attempts - 1)

    def wait_s(self, number: int, asked_s: float = 0.0) -> float:
        """Return the seconds between attempt `number` and the next."""
        backoff_s = random.uniform(0.5, 1.0) * self.first_wait_s * 2 ** min(number, 30)
        return min(max(backoff_s, asked_s), self.longest_wait_s)


class Transport:
    """JSON requests to one server; each call is one attempt with a deadline.

        transport = Transport("http://127.0.0.1:30000")
        info = await transport.get("/model_info")

    Connections are kept and shared by all requests of an event loop. At most `connections` requests run at once; others
    queue, and their deadline starts when they leave the queue. A request with a separate `deadline_s` is an operator's, and
    skips the queue. `api_key` is sent as a bearer token, user and password of the address as basic authentication. Messages
    contain none of them.
    """

    def __init__(
        self, base_url: str, *, deadline_s: float = 300.0, connections: int = 1024, api_key: str | None = None
    ):
        self.base_url = base_url.rstrip("/")
        self._deadline_s = deadline_s
        self._connections = connections
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        address = URL(self.base_url)
        if address.user is not None:
            self._headers.setdefault(
                "Authorization", aiohttp.BasicAuth(address.user, address.password or "").encode()
            )
            self.base_url = str(address.with_user(None)).rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._before: aiohttp.ClientSession | None = None  # connections that get no new requests
        self._line = asyncio.Semaphore(connections)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self, path: str, *, deadline_s: float | None = None) -> Any:
        """Send a GET request; return its JSON, or None for an empty body."""
        return await self._request("GET", path, None, deadline_s)

    async def ping(self, path: str, *, deadline_s: float | None = None) -> None:
        """Send a GET request and raise unless it succeeds; the answer need not be JSON."""
        await self._fetch("GET", path, None, deadline_s)

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, deadline_s: float | None = None
    ) -> Any:
        """Send a POST request; return its JSON, or None for an empty body."""
        return await self._request("POST", path, body, deadline_s)

    async def tell(self, path: str, *, deadline_s: float | None = None) -> None:
        """Send a POST request and raise unless it succeeds; the answer need not be JSON."""
        await self._fetch("POST", path, None, deadline_s)

    async def knock(self, *, deadline_s: float) -> None:
        """Raise NotConnectedError unless the server accepts a connection within `deadline_s` seconds."""
        address = URL(self.base_url)
        try:
            async with asyncio.timeout(deadline_s):
                _, writer = await asyncio.open_connection(address.host, address.port)
        except TimeoutError:
            raise NotConnectedError(f"No response from {self.base_url} within {deadline_s:g} s.") from None
        except OSError as error:
            raise NotConnectedError(f"Cannot connect to {self.base_url}: {error}.") from error
        writer.close()

    async def renew(self) -> None:
        """Use new connections for later requests, since an old one may hold an answer to another request.

        Requests on the old connections continue, until the next call.
        """
        before, self._before, self._session = self._before, self._session, None
        if before is not None:
            await before.close()

    async def close(self) -> None:
        sessions, self._session, self._before = (self._session, self._before), None, None
        for session in sessions:
            if session is not None and self._loop is asyncio.get_running_loop():
                await session.close()

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float | None
    ) -> Any:
        content = await self._fetch(method, path, body, deadline_s)
        if not content.strip():
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise UnreachableError(
                f"{method} {self.base_url}{path} did not return JSON: {_shown(content)}"
            ) from None

    async def _fetch(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float | None
    ) -> bytes:
        where = f"{method} {self.base_url}{path}"
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        session = await self._pool()
        line = self._line if deadline_s is None else nullcontext()
        deadline_s = deadline_s or self._deadline_s
        try:
            async with (
                line,
                asyncio.timeout(deadline_s),
                session.request(method, self.base_url + path, data=data, allow_redirects=False) as response,
            ):
                content = await response.read()
        except TimeoutError:
            raise UnreachableError(f"{where} did not answer within {deadline_s:g} s.") from None
        except aiohttp.ClientConnectorError as error:
            raise _not_connected(where, error) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UnreachableError(f"{where} failed: {type(error).__name__}: {error}") from error
        if 300 <= response.status < 400:  # perhaps to another host, which would get prompts and keys
            place = response.headers.get("Location")
            raise RefusedError(
                f"{where} answered {response.status}, a redirect to {place}, which is not followed."
            )
        if response.status >= 400:
            raise _refusal(where, response.status, response.headers, content)
        return content

    async def _pool(self) -> aiohttp.ClientSession:
        """Return the connections of the running event loop; drop those of another loop."""
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
    """Raise this process's soft limit, which is often 1024: less than one connection per sample of a rollout."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _not_connected(where: str, error: aiohttp.ClientConnectorError) -> UnreachableError:
    """Make the error of a failed connection: no server listens, or this process has too many open files."""
    if error.os_error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text = f"{where} was not sent: this process may open at most {limit} files. Next: raise `ulimit -n`."
        return UnreachableError(text, retry_after_s=1.0)
    return NotConnectedError(f"{where} failed: cannot connect: {error}.")


def _refusal(
    where: str, status: int, headers: Mapping[str, str], content: bytes
) -> RefusedError | UnreachableError:
    text = f"{where} answered {status}: {_shown(content)}"
    if status not in MAY_PASS:
        return RefusedError(text, status=status)
    try:
        retry_after_s = float(headers.get("Retry-After", 0))
    except ValueError:  # a date, which these servers do not send
        retry_after_s = 0.0
    return UnreachableError(text, retry_after_s=retry_after_s)


def _shown(content: bytes) -> str:
    text = content.decode(errors="replace").strip()
    page = "an HTML page, so another program or a proxy answers at this address."
    return page if text.startswith("<") else shortened(text, SHOWN)
