"""A shell as an environment: the policy writes commands and reads what they print.

rl4llm train configs/shell_grpo.yaml data.path=tasks/
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import cached_property
from typing import Any, Literal, NamedTuple

from rl4llm.core.base_env import LLM, SampleState
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.registry import from_extension
from rl4llm.core.schema import Count, Positive, checked, with_options
from rl4llm.core.types import ChatMessage
from rl4llm.data.template import ChatTemplate
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.envs.tools import tool
from rl4llm.envs.tools.formats import CallFormat, ToolCall, written_call
from rl4llm.extensions.workspaces import Program, Workspace, WorkspaceError, Workspaces
from rl4llm.extensions.workspaces.workspace import Kept

NOTE_CHARS = 200  # at most, behind an output and in it
EPISODE_S = 3600.0  # for a command, the opening of its workspace included
START = "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi"
BLOCK = re.compile(
    r"^(`{3,}|~{3,})[ \t]*(?:(?:sh|bash|shell)[ \t]*)?\n(.*?)(?:^\1[`~]*[ \t]*$|\Z)", re.M | re.S
)
EXIT = re.compile(r"(?:\A|[;&|\n(])\s*exit(?:\s+\d+)?[\s;)]*\Z")
CODE = re.compile(rb"(\d{1,3})\n|.{0,3}\n|.{4}", re.S)  # or what stands in its place
CHUNK = 1 << 16
COUNTS = ("tool_calls", "tool_errors", "commands", "exit_errors", "timeouts")


class Outcome(NamedTuple):
    """What a command printed, and its exit code, or how it ended without one: after its time, or with the shell.

    `limit` is the limit of the workspace that ended the shell.
    """

    output: str
    code: int | None
    end: str = ""
    limit: str = ""


class Shell:
    """A shell in a workspace, which keeps its directory, variables and background processes between commands.

    A command's standard input is empty. Its end is a line with a random mark, which the shell writes to a copy of its
    output that the command does not have. A command that takes too long ends the shell, and the next one starts another.

    Args:
        command_s: seconds that a command may take.
        max_chars: of a longer output, the beginning and the end are kept.
    """

    def __init__(self, workspace: Workspace, command_s: float, max_chars: int):
        self.workspace, self.command_s, self.max_chars = workspace, command_s, max_chars
        self._program: Program | None = None
        self._rest = b""

    async def run(self, command: str) -> Outcome:
        """Run one command, of any number of lines; raise WorkspaceError if no shell starts."""
        if self._program is None:
            self._program, self._rest = await self.workspace.start(["/bin/sh", "-c", START]), b""
            self._program.stdin.write(b"exec 9>&1 2>&1\n")
        program = self._program
        mark, half = secrets.token_hex(16), secrets.token_hex(16)
        text = shlex.quote(command.replace("\0", ""))
        # The shell reads the mark with the command, before it runs. `set -x` shows the mark in two parts. A group in braces
        # would not survive errors of syntax in bash.
        line = f"command eval {text} </dev/null 9>&-; command printf '%s%s %s\\n' {mark} {half} \"$?\" >&9\n"
        program.stdin.write(line.encode(errors="replace"))
        output, code, end = Kept(2 * self.max_chars), None, "ended"
        try:
            async with asyncio.timeout(self.command_s):
                code = await self._read(program.stdout, output, f"{mark}{half} ".encode())
        except TimeoutError:
            end = "timeout"
        if code is not None:
            return Outcome(output.text(self.max_chars).strip("\n"), code)
        output.add(self._rest)
        return Outcome(output.text(self.max_chars).strip("\n"), None, end, await self.end())

    async def end(self) -> str:
        """End the shell and everything that it started; return the limit of the workspace that ended it before, if any.

        Raises WorkspaceError if the shell never ran.
        """
        if self._program is None:
            return ""
        program, self._program = self._program, None
        program.stdin.close()
        await program.kill()
        return str(program.reason)

    async def _read(self, stream: asyncio.StreamReader, output: Kept, mark: bytes) -> int | None:
        """Read up to the line with the mark and return the exit code in it.

        Return None if the shell ends before, or writes anything but a code: a function of the policy replaced a command.
        """
        while (place := self._rest.find(mark)) < 0 or not (end := CODE.match(self._rest, place + len(mark))):
            safe = place if place >= 0 else max(0, len(self._rest) - len(mark))
            output.add(self._rest[:safe])
            self._rest = self._rest[safe:]
            chunk = await stream.read(CHUNK)
            if not chunk:
                return None
            self._rest += chunk
        output.add(self._rest[:place])
        self._rest = self._rest[end.end() :]
        return int(end[1]) if end[1] else None


@tool(timeout_s=EPISODE_S)
def shell(command: str) -> None:
    """Run a command in a shell, which keeps its directory and variables.

    Args:
        command: One or more lines for the shell.
    """  # the schema alone: `ShellEnv._run` has the workspace of the episode


def fenced(text: str) -> Iterator[ToolCall]:
    """Yield a call of the shell with the code of all blocks of a reply; blocks of other languages are text."""
    if commands := [block[2] for block in BLOCK.finditer(text) if block[2].strip()]:
        yield ToolCall("shell", {"command": "".join(commands)})


def exits(command: str) -> bool:
    """Return whether a command ends with `exit`; its last characters tell, so that spaces cost no more than their number."""
    return EXIT.search(command.rstrip()[-40:]) is not None


FENCED = CallFormat(fenced, example="```sh\nf x\n```")


class ShellEnv(ToolMDPEnv):
    """Runs the commands of each turn in one shell of the episode's workspace, until a turn has no command.

    The reply is the output of the command, and its exit code if that is not 0 or nothing was printed. The command `exit`
    ends the episode too. If a command takes too long or ends the shell, the reply tells it, and the next one starts in a
    new shell.

    If the row has a `task`, its tests run at the end in the same workspace, when nothing of the policy runs any more. What
    they find is in ``sample.extras["task"]``, for the reward `task`, and what the policy changed in
    ``sample.extras["changes"]``. A row's column `files`, texts by path, is written before the first command.

    A workspace that does not work fails the sample with the class `env/workspace`. Beside those of the tools, the metrics
    are `env/commands`, `env/exit_errors` (commands with another exit code than 0) `env/timeouts` and
    `env/tests_timed_out`.

    Args:
        workspace: options of the workspaces, such as ``{image: host}``, see `Workspaces`.
        calls: "tool" for calls of a tool `shell` with a `command`, "block" for fenced blocks (```sh). "auto" is "tool" if
            the chat template writes calls.
        command_s: seconds that a command may take.
        max_reply_chars: of a longer output, the beginning and the end are shown, with the length of the cut.
        tools: further tools, with calls.
    """

    default_rewards = ("task",)

    @checked("env")
    def __init__(
        self,
        *args: Any,
        workspace: Mapping[str, Any] | None = None,
        calls: Literal["auto", "tool", "block"] = "auto",
        command_s: Positive = 30.0,
        max_steps: Count = 16,
        max_calls: Count = 1,
        max_reply_chars: Count = 4000,
        tools: Sequence[Any] = (),
        **kwargs: Any,
    ):
        self._count = (workspace or {}).get("count", 16)
        options = {**(workspace or {}), "count": self._count}
        self.workspaces: Workspaces = with_options("env.workspace", Workspaces, options)
        self.command_s = command_s
        kwargs |= {"max_steps": max_steps, "max_calls": max_calls, "tools": (shell, *tools)}
        super().__init__(*args, max_reply_chars=max_reply_chars + NOTE_CHARS, **kwargs)
        self.in_blocks = calls == "block" or (calls == "auto" and not self._writes_calls())
        if self.in_blocks:
            if tools:
                raise ConfigError("env.tools needs calls, and env.calls=block has none. Set env.calls=tool.")
            self.tool_schemas, self.reply_roles = None, ("user",)
        self._tasks: Any = None
        if any(map(_has_task, self.dataset)):
            self._tasks = from_extension("tasks", "The column 'task'")(self.workspaces)
        self._shells: dict[int, Shell] = {}
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @cached_property
    def format(self) -> CallFormat:
        """How the policy writes commands."""
        return FENCED if self.in_blocks else super().format

    async def respond(self, sample: SampleState) -> list[ChatMessage]:
        sample.extras.setdefault("metrics", dict.fromkeys(COUNTS, 0))
        replies = await super().respond(sample)
        if sample.extras.pop("exit", False):
            return []
        if replies and self.in_blocks:
            return [ChatMessage("user", "\n".join(reply.content for reply in replies))]
        return replies

    def end_episode(self, sample: SampleState) -> list[Future[None]]:
        """Begin to run the tests of the sample's task, and to remove its workspace."""
        ending = asyncio.run_coroutine_threadsafe(self._conclude(sample), asyncio.get_running_loop())
        return [*super().end_episode(sample), ending]

    def close(self) -> None:
        """Release the workspaces, the tools and the rewards."""
        self.workspaces.close()
        super().close()

    def _writes_calls(self) -> bool:
        return bool(written_call(ChatTemplate(self.tokenizer, self.tool_schemas, self.template_args)))

    def _said(self, sample: SampleState) -> str:
        return sample.last_message.content if self.in_blocks else super()._said(sample)

    async def _run(self, sample: SampleState, call: ToolCall) -> Any:
        if call.name != "shell":
            return await super()._run(sample, call)
        command = call.arguments["command"]
        with _failing(sample):
            outcome = await (await self._shell(sample)).run(command)
        if sample.failure is not None:
            return ""
        counts = sample.extras["metrics"]
        events = ("commands", True), ("exit_errors", outcome.code), ("timeouts", outcome.end == "timeout")
        counts |= {name: counts.get(name, 0) + bool(happened) for name, happened in events}
        if outcome.end == "ended" and exits(command):
            sample.extras["exit"] = True
        return self._told(outcome)

    async def _shell(self, sample: SampleState) -> Shell:
        """Return the shell of an episode, in its workspace; raise WorkspaceError if it gets none."""
        if id(sample) not in self._shells:
            columns = sample.columns
            opened = self._tasks.open(columns) if _has_task(columns) else self.workspaces.open()
            shell = Shell(await opened, self.command_s, self.max_reply_chars - NOTE_CHARS)
            self._shells[id(sample)] = shell
            await shell.workspace.place(columns.get("files"))
        return self._shells[id(sample)]

    async def _conclude(self, sample: SampleState) -> None:
        """Grade an episode that has ended by itself, and remove its workspace."""
        try:
            with _failing(sample):
                played = id(sample) in self._shells or _has_task(sample.columns)
                if sample.done and sample.failure is None and played:
                    await self._grade(sample, await self._shell(sample))
        finally:
            if shell := self._shells.pop(id(sample), None):
                await shell.workspace.close()

    async def _grade(self, sample: SampleState, shell: Shell) -> None:
        await shell.end()
        sample.extras["changes"] = await shell.workspace.changes()
        if _has_task(sample.columns):
            verdict = await self._tasks.grade(sample.columns, shell.workspace)
            sample.extras["task"] = asdict(verdict)
            sample.extras.setdefault("metrics", {})["tests_timed_out"] = int(verdict.timed_out)

    @asynccontextmanager
    async def _ending(self, sample: SampleState, llm: LLM) -> AsyncIterator[None]:
        """Wait for one of the pool's places before an episode; meanwhile the sample holds no engine."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = loop, asyncio.Semaphore(self._count)
        places = self._places[1]
        if waits := places.locked():
            await llm.close(sample)
        async with places:
            if waits:
                await llm.open(sample)
            async with super()._ending(sample, llm):
                yield

    def _told(self, outcome: Outcome) -> str:
        again = "The next command starts in a new shell."
        notes = {
            "": f"[exit code {outcome.code}]" if outcome.code or not outcome.output else "",
            "timeout": f"[The command was stopped after {self.command_s:g} s. {again}]",
            "ended": f"[The shell ended{outcome.limit and ': '}{outcome.limit}. {again}]",
        }
        return "\n".join(filter(None, [outcome.output, notes[outcome.end]]))


@contextmanager
def _failing(sample: SampleState) -> Iterator[None]:
    """Fail the sample for a fault of its workspace or its row."""
    try:
        yield
    except (WorkspaceError, ConfigError) as error:  # the latter for an image
        sample.fail(str(error), "env/workspace")
    except DataError as error:
        sample.fail(str(error), "env/task")


def _has_task(columns: Mapping[str, Any]) -> bool:
    return bool(columns.get("task"))
