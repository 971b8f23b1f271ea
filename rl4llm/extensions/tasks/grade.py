"""Workspaces for tasks, and the hidden tests that run in them after an episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.extensions.tasks.task import Script, read_task
from rl4llm.extensions.tasks.verdict import LOGS, REPORTS, REWARDS, Verdict, read_verdict

READ_BYTES = 1 << 24
CLEAR_S = 60.0
FRESH = {"PYTHONNOUSERSITE": "1", "HOME": "/logs/home"}  # not the episode's settings and packages
STARTS = 'command -v "$1"'
CLEAR = f"""
chmod u+w /
for name in tests logs; do
    if [ -e /$name ] || [ -L /$name ]; then mv /$name /.$2-$name || exit 1; fi
done
mkdir -p {LOGS} {FRESH["HOME"]} && {STARTS}
"""
"""Moves away what an episode has put where tests are bound and write, such as links, locked directories and rewards.

Nothing that the episode started is running any more, so it has no file open in the new directories.
"""


class Tasks:
    """Opens the workspaces of tasks and grades what episodes did in them.

    The hidden tests run in a second start, in which no process of the episode is left, and are bound read-only for that
    start alone. The program that they test runs with them: what it does then, such as writing a reward, is not
    prevented.
    """

    def __init__(self, workspaces: Any):
        self._workspaces = workspaces
        self._working: dict[tuple[str, str], bool] = {}

    async def open(self, columns: Mapping[str, Any], *, sockets: Mapping[int, str] | None = None) -> Any:
        """Open a workspace with the task's image, else that of the pool, with the task's variables and directory."""
        task = read_task(Path(columns["task"]))
        workspace = await self._workspaces.open(task.image, sockets=sockets)
        workspace.environment = {**workspace.environment, **task.env}
        workspace.cwd = task.workdir or workspace.cwd
        try:
            words = ["sh", "-c", STARTS, "sh", task.test.words[0]]
            if (await workspace.run(words, wall_s=CLEAR_S)).code != 0:  # later it may be the episode's fault
                raise DataError(f"{columns['task']}: the image cannot start its tests with {words[-1]}.")
        except BaseException:
            await workspace.close()
            raise
        return workspace

    async def solve(self, columns: Mapping[str, Any], workspace: Any) -> None:
        """Run the task's solution, where an episode would play."""
        task = read_task(Path(columns["task"]))
        if task.solution:
            await _run(workspace, task.solution)

    async def grade(self, columns: Mapping[str, Any], workspace: Any) -> Verdict:
        """Run the task's tests in the workspace of an episode, which is closed if they leave no verdict.

        They give 0 if they take too long, or if they have a verdict where nothing was done: then the episode broke them.
        Raises DataError for tests that are broken, and the workspace's error where it does not work.
        """
        try:
            return await self._verdict(columns, workspace)
        except DataError as error:
            await workspace.close()  # `count` may be 1
            if not await self._work(columns):
                raise
            return Verdict(0.0, output=str(error))

    async def _verdict(self, columns: Mapping[str, Any], workspace: Any) -> Verdict:
        task, output = read_task(Path(columns["task"])), ""
        words = ["sh", "-c", CLEAR, "sh", task.test.words[0], token_hex(8)]
        cleared = await workspace.run(words, wall_s=CLEAR_S)
        try:
            if cleared.code != 0:
                raise DataError("the tests cannot start.")
            result = await _run(workspace, replace(task.test, env={**FRESH, **task.env, **task.test.env}))
            output = result.output
            if result.timed_out:
                output += f"\n[stopped after {task.test.wall_s:g} s]"
                return Verdict(0.0, output=output, timed_out=True)
            names = (*REWARDS, *REPORTS)
            files = {name: await workspace.read(f"{LOGS}/{name}", READ_BYTES) for name in names}
            return read_verdict(files, result.code, task.test.text, output)
        except DataError as error:
            printed = Verdict(0.0, output=output or cleared.output).printed
            raise DataError(f"{columns['task']}: {error} {printed}") from error

    async def _work(self, columns: Mapping[str, Any]) -> bool:
        """Return whether the tests of a row have a verdict in a workspace where nothing was done."""
        row = columns["task"], repr(columns.get("files"))
        if row not in self._working:
            workspace = await self.open(columns)
            try:
                await workspace.place(columns.get("files"))
                await self._verdict(columns, workspace)
                self._working[row] = True
            except DataError:
                self._working[row] = False
            finally:
                await workspace.close()
        return self._working[row]


async def _run(workspace: Any, script: Script) -> Any:
    return await workspace.run(script.words, env=script.env, files=script.files, wall_s=script.wall_s)
