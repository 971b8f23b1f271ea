"""Ways to run an agent: as a command in a separate process, or as a Python function."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4llm.core.errors import ConfigError
from rl4llm.core.redact import short_environment
from rl4llm.core.registry import imported
from rl4llm.runtime.raised import raised
from rl4llm.runtime.supervise import supervised
from rl4llm.runtime.threads import in_own_thread

MAX_OUTPUT = 1024**2  # bytes of an agent's standard output that are kept
MAX_LAST_WORDS = 2000  # bytes at the end of its standard error that are shown
GRACE_S = 1.0  # between asking a process to end and killing it
STOP_S = 40.0  # until the supervisor itself is killed


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """What an agent returned or printed, and how it crashed, if it did."""

    output: str = ""
    crash: str | None = None


class CommandAgent:
    """A command: it reads the task as JSON from standard input and prints its output; exit code 0 is success.

    The variables OPENAI_BASE_URL and OPENAI_API_KEY, and ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, hold the policy's
    address and key. Of the trainer's variables it sees only those of `short_environment`, since the policy may read what
    the agent sees; `env` adds others. When it ends or is stopped, all processes that it started are killed.
    """

    def __init__(self, command: str | Sequence[str], env: Mapping[str, str] | None = None):
        self.env = dict(env or {})
        wrong = [name for name, value in self.env.items() if not isinstance(value, str)]
        if wrong:
            raise ConfigError(f"env.env: the value of {wrong[0]!r} must be a string. Put it in quotes.")
        self.words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        if not self.words or shutil.which(self.words[0]) is None:
            raise ConfigError(
                f"env.command={command!r} is not accepted: the program {self.words[:1]} was not found."
            )

    async def run(self, task: Mapping[str, Any], base_url: str, api_key: str) -> AgentOutcome:
        try:
            process = await self._start(base_url, api_key)
        except OSError as error:
            return AgentOutcome(crash=f"it could not be started: {error}")
        assert process.stdin and process.stdout and process.stderr  # they are pipes
        try:
            _, output, errors, _ = await asyncio.gather(
                _feed(process.stdin, json.dumps(task, default=str).encode()),
                _first(process.stdout, MAX_OUTPUT),
                _last(process.stderr, MAX_LAST_WORDS),
                process.wait(),
            )
        finally:
            await _end(process)
        details = f": {errors}" if errors else " and no output on standard error"
        crash = (
            f"it ended with exit code {_exit_code(process.returncode)}{details}"
            if process.returncode
            else None
        )
        return AgentOutcome(output, crash)

    async def _start(self, base_url: str, api_key: str) -> asyncio.subprocess.Process:
        no_proxy = ",".join(filter(None, (self.env.get("NO_PROXY", os.environ.get("NO_PROXY")), "127.0.0.1")))
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *supervised(self.words, GRACE_S),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env={
                **short_environment(),
                **self.env,
                "OPENAI_BASE_URL": base_url,
                "OPENAI_API_KEY": api_key,
                "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": api_key,
                "NO_PROXY": no_proxy,
                "no_proxy": no_proxy,
            },
            start_new_session=True,  # Ctrl-C in a terminal must reach only the trainer
        )


class FunctionAgent:
    """A function ``(task, base_url, api_key)``, async or not; its return value is its output.

    An async function runs in the trainer's event loop and must not block it. A plain function runs in a thread, which
    cannot be stopped: after its deadline it keeps running, and all its requests are refused.
    """

    def __init__(self, function: str | Callable[..., Any]):
        self.function = imported("env.agent", function) if isinstance(function, str) else function
        if not callable(self.function):
            raise ConfigError(
                f"env.agent={function!r} is not accepted. Accepted: a function (task, base_url, api_key)."
            )

    async def run(self, task: Mapping[str, Any], base_url: str, api_key: str) -> AgentOutcome:
        try:
            if inspect.iscoroutinefunction(self.function):
                output = await self.function(task, base_url, api_key)
            else:
                output = await in_own_thread("rl4llm-agent", lambda: self.function(task, base_url, api_key))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own code, like `respond`
            return AgentOutcome(crash=raised("it", error))
        if not isinstance(output, str):
            output = "" if output is None else json.dumps(output, ensure_ascii=False, default=str)
        return AgentOutcome(output[:MAX_OUTPUT].strip())


async def _feed(stdin: asyncio.StreamWriter, content: bytes) -> None:
    """Write an agent's task and end its input."""
    with contextlib.suppress(OSError):  # the agent may not read its task
        stdin.write(content)
        await stdin.drain()
        stdin.close()


async def _first(stream: asyncio.StreamReader, limit: int) -> str:
    kept = b""
    while piece := await stream.read(65536):
        kept += piece[: limit - len(kept)]
    return kept.decode(errors="replace").strip()


async def _last(stream: asyncio.StreamReader, limit: int) -> str:
    kept = b""
    while piece := await stream.read(65536):
        kept = (kept + piece)[-limit:]
    return kept.decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask the supervisor to kill what is left of the agent and to end."""
    if process.returncode is not None:
        return
    for number, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience_s)
            return


def _exit_code(code: int) -> str:
    """Format the exit code as the supervisor passes it on: 128 plus the number of a signal."""
    number = code - 128 if code > 128 else -code
    return f"{code} ({signal.Signals(number).name})" if number in set(signal.Signals) else str(code)
