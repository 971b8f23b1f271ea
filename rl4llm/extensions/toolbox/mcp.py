"""The tools of any MCP server (Model Context Protocol), over stdio or HTTP; by the official package mcp."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from rl4llm.core.errors import ConfigError, EnvError, unknown
from rl4llm.core.registry import needed
from rl4llm.envs.tools.tool import Tool, ToolError, ToolSet
from rl4llm.extensions.toolbox.mcp_answers import text_of
from rl4llm.runtime.threads import in_own_thread

CLOSE_TIMEOUT_S = 15.0
# In JSON-RPC: parse error, invalid request, no such method, internal error.
SERVERS_FAULT = (-32700, -32600, -32601, -32603)
POLL_S = 0.1
KEPT_ERRORS = 16 * 1024


class MCP(ToolSet):
    """What a server offers, with the schemas that it gives.

        tools: [{name: mcp, command: [python, my_server.py]}, {name: mcp, url: "http://localhost:8000/mcp", only: [add]}]

    The server is connected to at once, and ConfigError says when it cannot be. Episodes share the connection. When it
    breaks, the samples whose calls it carried fail, and the next call connects again. A deadline is that of other tools.

    A server that remembers would carry what one episode did into the next. With `per_episode` each episode has its own
    connection, from its first call to its end, and its own server process if there is a `command`. The first call waits for
    the server to start, within the deadline of the call. No more servers start at once than there are processors. When the
    connection breaks, the episode fails.

    Args:
        command: what starts a server that talks over stdin and stdout; it is ended with the run.
        url: of a server that is there.
        env: variables for the command.
        only: names of the tools to take; by default all.
        connect_timeout_s: seconds that a server has to say what it offers.
        per_episode: whether each episode has its own connection, and so its own server process.
    """

    _session: _Session | None

    def __init__(
        self,
        command: Sequence[str] = (),
        url: str = "",
        env: Mapping[str, str] | None = None,
        only: Sequence[str] = (),
        connect_timeout_s: float = 30.0,
        per_episode: bool = False,
    ):
        if bool(command) == bool(url):
            raise ConfigError(f"env.tools: mcp: {command=} with {url=} is not accepted: a list, or a url.")
        mcp = needed("mcp", "env.tools: mcp")
        self._where = url or " ".join(command)
        self._server = url or mcp.StdioServerParameters(
            command=command[0], args=list(command[1:]), env=dict(env) if env else None
        )
        self._connect_timeout_s = connect_timeout_s
        self._per_episode = per_episode
        self._starting = threading.Semaphore(os.cpu_count() or 1)  # one for the sets of all episodes
        self._begin()
        try:
            offered = self._connected().offered
        except EnvError as error:
            raise ConfigError(f"env.tools: {error}") from error
        if absent := [name for name in only if name not in offered]:
            raise ConfigError(unknown("env.tools: mcp: only", absent[0], offered))
        self.tools = {name: self._tool(name, offered[name]) for name in only or offered}
        if per_episode:
            self.close()  # no episode talks to this one

    @property
    def of_episodes(self) -> bool:
        return self._per_episode

    def open(self, sample: Any) -> Self:
        """Return a set for one episode, which connects at its first call; this set itself if all share it."""
        if not self._per_episode:
            return self
        opened = copy.copy(self)
        opened._begin()
        opened.tools = {name: opened._tool(name, tool.schema) for name, tool in self.tools.items()}
        return opened

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            if self._session is not None:
                self._session.close()
                self._session = None

    def _tool(self, name: str, schema: Mapping[str, Any]) -> Tool:
        async def call(**arguments: Any) -> str:
            session = await in_own_thread("rl4llm-mcp-connect", self._connected)
            return await session.call(name, arguments)

        return Tool(schema, call)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._session = None

    def _connected(self) -> _Session:
        """Return the session, a new one where the old one is over; raise EnvError when there cannot be one."""
        with self._lock:
            if self._session is not None and self._session.over and self._per_episode:
                raise EnvError(f"mcp: the connection of this episode to {self._where} is over.")
            if self._session is None or self._session.over:
                self._session = self._started()
            return self._session

    def _started(self) -> _Session:
        """Return a session when few enough servers are starting; raise EnvError if the tools are closed before that."""
        while not self._closing.is_set():
            if self._starting.acquire(timeout=POLL_S):
                try:
                    session = _Session(self._server, self._where)
                    session.wait(self._connect_timeout_s)
                    return session
                finally:
                    self._starting.release()
        raise EnvError(f"mcp: the tools of {self._where} were closed before it was started.")


class _Session:
    """One connection, in a separate event loop and thread, since it outlives the event loop of a rollout."""

    def __init__(self, server: Any, where: str):
        self._mcp, self._server, self._where = needed("mcp", "env.tools: mcp"), server, where
        self._ready: Future[Mapping[str, Mapping[str, Any]]] = Future()
        self._client: Any = None
        self._errors = _Errors()
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self.offered: Mapping[str, Mapping[str, Any]] = {}
        self.over = False
        self._thread = threading.Thread(target=self._run, name="rl4llm-mcp", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Until the server has said what it offers; raises EnvError when it does not in time."""
        try:
            self.offered = self._ready.result(timeout_s)
        except TimeoutError as error:
            self.close()
            reason = f"did not say what it offers within {timeout_s:g} s.{self._said()}"
            raise EnvError(f"mcp: {self._where} {reason}") from error
        except Exception as error:
            raise EnvError(f"mcp: no connection to {self._where}: {_cause(error)}.{self._said()}") from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a tool's answer as text. Raises ToolError when the tool reports a failed call, EnvError when the server is
        at fault or the connection broke."""
        calling = asyncio.run_coroutine_threadsafe(self._client.call_tool(name, dict(arguments)), self._loop)
        try:
            result = await asyncio.wrap_future(calling)
        except self._mcp.MCPError as error:
            if error.code in SERVERS_FAULT:
                raise EnvError(f"mcp: {self._where} could not run {name}: {error}.{self._said(0)}") from error
            if error.code != self._mcp.types.CONNECTION_CLOSED:
                raise ToolError(str(error)) from error
            self.over = True
            self._stop()
            raise EnvError(f"mcp: {self._where} broke while it ran {name}.{self._said()}") from error
        text = text_of(result)
        if result.is_error:
            raise ToolError(text)
        return text

    def close(self) -> None:
        """End the connection, and with it a server that was started for it."""
        self._stop()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _said(self, patience_s: float = 1.0) -> str:
        words = self._errors.end(patience_s)[-300:]
        return f" It said: {words}" if words else ""

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._serving.cancel)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serving)
        except BaseException as error:  # noqa: BLE001 - whoever waits for it raises the error
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self.over = True
            self._loop.close()
            self._errors.file.close()

    async def _serve(self) -> None:
        stdio = isinstance(self._server, self._mcp.StdioServerParameters)
        server = self._mcp.stdio_client(self._server, errlog=self._errors.file) if stdio else self._server
        async with self._mcp.Client(server) as client:
            self._client = client
            client.session.validate_tool_result = _accept
            self._ready.set_result({tool.name: _schema(tool) for tool in await _listed(client)})
            await asyncio.Event().wait()


class _Errors:
    """What a started server writes to stderr: drained as it comes, and only its end is kept.

    The server gets `file`, the one end of a pipe. A thread reads the other end until every process has closed it.
    """

    def __init__(self) -> None:
        source, target = os.pipe()
        self.file = open(target, "w")  # noqa: SIM115 - closed with the session
        self._kept = b""
        self._draining = threading.Thread(
            target=self._drain, args=(source,), name="rl4llm-mcp-stderr", daemon=True
        )
        self._draining.start()

    def end(self, patience_s: float) -> str:
        """Return the last of what was written, with the rest in the pipe of a server that ends within the patience.

        No server can be started after this.
        """
        self.file.close()
        self._draining.join(patience_s)
        return self._kept.decode(errors="replace").strip()

    def _drain(self, source: int) -> None:
        with open(source, "rb", buffering=0) as pipe:
            while chunk := pipe.read(KEPT_ERRORS):
                self._kept = (self._kept + chunk)[-KEPT_ERRORS:]


async def _listed(client: Any) -> list[Any]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


async def _accept(name: str, result: Any) -> None:
    """Accept the answer of a tool, also a text where its output schema asks for structured content."""


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
