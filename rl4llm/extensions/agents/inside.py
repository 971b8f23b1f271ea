"""Agents inside a workspace: the machine that they see is an image, and its only way out leads to the policy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import from_extension
from rl4llm.core.schema import with_options
from rl4llm.extensions.agents.runs import AgentOutcome, CommandAgent

PORT = 7411  # of the policy, inside
HOME = "/tmp/.agent"  # with the agent's settings, so that what differs from the image is its work
CLEAR_S = 60.0


class WorkspaceAgent(CommandAgent):
    """A command that runs in a workspace of its episode, in the directory of the image; HOME is removed at its end.

    A row with the column `task` has the image of that task, and its hidden tests run when the agent has ended. The column
    `files`, texts by path, is written before the agent starts.
    """

    def __init__(self, workspace: Mapping[str, Any], *command: Any, **options: Any):
        super().__init__(*command, **options)
        self.workspaces = with_options(
            "env.workspace", from_extension("workspaces", "env.workspace"), workspace
        )

    @cached_property
    def _tasks(self) -> Any:
        return from_extension("tasks", "the column 'task'")(self.workspaces)

    def _check(self) -> None:
        """Leave the words: they name what is in the image."""
        if not self.words:
            raise ConfigError("env.command is empty. Set it to a program of the image.")

    @asynccontextmanager
    async def opened(self, sample: SampleState, socket: str) -> AsyncIterator[Any]:
        """Open a workspace in which PORT leads to a Unix socket."""
        sockets = {PORT: socket}
        if sample.columns.get("task"):
            workspace = await self._tasks.open(sample.columns, sockets=sockets)
        else:
            workspace = await self.workspaces.open(sockets=sockets)
        try:
            await workspace.place(sample.columns.get("files"))
            yield workspace
        finally:
            await workspace.close()

    async def run_in(self, workspace: Any, task: Mapping[str, Any], api_key: str) -> AgentOutcome:
        """Run the agent as `run` does."""
        base_url = f"http://127.0.0.1:{PORT}/{api_key}/v1"
        fill = self._filler(task, base_url, api_key)
        for path, text in self.files.items():
            await workspace.write(str(Path(HOME, path)), fill(text).encode())
        program = await workspace.start(
            [fill(word) for word in self.words],
            env={"HOME": HOME, **self._variables(fill, base_url, api_key)},
        )
        try:
            return await self._outcome(program, task)
        finally:
            await program.kill()

    async def grade(self, sample: SampleState, workspace: Any) -> None:
        """Store what the agent changed, and what the tests of its task say."""
        await workspace.run(["rm", "-rf", HOME], wall_s=CLEAR_S)
        sample.extras["changes"] = await workspace.changes()
        if sample.columns.get("task"):
            verdict = await self._tasks.grade(sample.columns, workspace)
            sample.extras["task"] = asdict(verdict)
            sample.extras["metrics"]["tests_timed_out"] = int(verdict.timed_out)
