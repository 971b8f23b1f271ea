"""Ways to run an agent: as a command in a separate process, or as a Python function."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import site
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.redact import short_environment
from rl4llm.core.registry import imported
from rl4llm.runtime.raised import raised
from rl4llm.runtime.supervise import supervised
from rl4llm.runtime.threads import in_own_thread

MAX_OUTPUT = 1024**2  # bytes of an agent's standard output that are kept
MAX_LAST_WORDS = 2000  # bytes at the end of its standard error that are shown
GRACE_S = 1.0  # between asking a process to end and killing it
STOP_S = 40.0  # until the supervisor itself is killed
NAMES = re.compile(r"\{(prompt|base_url|key)\}")


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """What an agent returned or printed, and how it crashed, if it did."""

    output: str = ""
    crash: str | None = None


class Program(Protocol):
    """A started process with pipes, on this machine or in a workspace."""

    @property
    def stdin(self) -> asyncio.StreamWriter | None: ...
    @property
    def stdout(self) -> asyncio.StreamReader | None: ...
    @property
    def stderr(self) -> asyncio.StreamReader | None: ...
    async def wait(self) -> int: ...


class CommandAgent:
    """A command that starts an agent in a new directory, its working directory and HOME; exit code 0 is success.

    In the words of the command, in `env` and in `files`, the texts of files in that directory, `{prompt}` becomes the
    last message of the user, and `{base_url}` and `{key}` the policy's address. Without a `{prompt}`, the command reads
    its task as JSON from standard input. What it prints is its output.

    The variables OPENAI_BASE_URL and OPENAI_API_KEY, and ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, hold the address too.
    Of the trainer's variables it sees only those of `short_environment`, since the policy may read what the agent sees;
    `env` adds others. When it ends or is stopped, all processes that it started are killed.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
    ):
        self.env, self.files = dict(env or {}), dict(files or {})
        for option in ("env", "files"):
            for name, value in getattr(self, option).items():
                if not isinstance(value, str):
                    raise ConfigError(
                        f"env.{option}: the value of {name!r} must be a string. Put it in quotes."
                    )
        self.words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        self._has_prompt = any(
            "{prompt}" in text for text in (*self.words, *self.env.values(), *self.files.values())
        )
        self._check()

    def _check(self) -> None:
        """Find the files that the command names, since it runs in another directory. Raises ConfigError."""
        program = self.words and shutil.which(self.words[0], path=self.env.get("PATH"))
        if not program:
            raise ConfigError(
                f"env.command={shlex.join(self.words)!r} is not accepted: the program {self.words[:1]} was not found."
            )
        self.words = [os.path.abspath(word) if os.path.isfile(word) else word for word in self.words]
        self.words[0] = os.path.abspath(program)
        for path in self.files:
            if os.path.isabs(path) or ".." in Path(path).parts:
                raise ConfigError(
                    f"env.files: {path!r} is not accepted. Accepted: a path in the agent's directory."
                )

    async def run(self, task: Mapping[str, Any], base_url: str, api_key: str) -> AgentOutcome:
        """Run the agent. Raises DataError if its command has a `{prompt}` and the task no message of the user."""
        fill = self._filler(task, base_url, api_key)
        directory = tempfile.TemporaryDirectory(prefix="rl4llm-agent-", ignore_cleanup_errors=True)
        try:
            for path, text in self.files.items():
                file = Path(directory.name, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(fill(text), encoding="utf-8")
            process = await self._start(
                [fill(word) for word in self.words], directory.name, self._variables(fill, base_url, api_key)
            )
            try:
                return await self._outcome(process, task)
            finally:
                await _end(process)
        except OSError as error:
            return AgentOutcome(crash=f"it could not be started: {error}")
        finally:
            await asyncio.to_thread(directory.cleanup)

    def _filler(self, task: Mapping[str, Any], base_url: str, api_key: str) -> Callable[[str], str]:
        """Return a function that puts values in the place of their names in braces."""
        values = {"base_url": base_url, "key": api_key}
        if self._has_prompt:
            values["prompt"] = _prompt_of(task["messages"])
        return lambda text: NAMES.sub(lambda name: values[name[1]], text)

    async def _outcome(self, process: Program, task: Mapping[str, Any]) -> AgentOutcome:
        """Hand a started agent its task and wait for its end."""
        assert process.stdin and process.stdout and process.stderr  # they are pipes
        content = b"" if self._has_prompt else json.dumps(task, default=str).encode()
        _, output, errors, code = await asyncio.gather(
            _feed(process.stdin, content),
            _first(process.stdout, MAX_OUTPUT),
            _last(process.stderr, MAX_LAST_WORDS),
            process.wait(),
        )
        details = f": {errors}" if errors else " and no output on standard error"
        crash = f"it ended with exit code {_exit_code(code)}{details}" if code else None
        return AgentOutcome(output, crash)

    async def _start(
        self, words: Sequence[str], directory: str, variables: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        return await asyncio.create_subprocess_exec(
            *supervised(words, GRACE_S),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=directory,
            env={
                **short_environment(),
                "PYTHONPATH": os.pathsep.join(paths),
                "PYTHONUSERBASE": site.getuserbase(),  # else below HOME
                "HOME": directory,
                **variables,
            },
            start_new_session=True,  # Ctrl-C in a terminal must reach only the trainer
        )

    def _variables(self, fill: Callable[[str], str], base_url: str, api_key: str) -> dict[str, str]:
        no_proxy = ",".join(filter(None, (self.env.get("NO_PROXY", os.environ.get("NO_PROXY")), "127.0.0.1")))
        return {
            **{name: fill(value) for name, value in self.env.items()},
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
            "NO_PROXY": no_proxy,
            "no_proxy": no_proxy,
        }


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


def _prompt_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message of the user."""
    content = next((row["content"] for row in reversed(messages) if row["role"] == "user"), None)
    if content is None:
        raise DataError("env.command has {prompt}, but the row has no message of the user.")
    parts = [{"text": content}] if isinstance(content, str) else content
    return "".join(part.get("text", "") for part in parts)


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
