"""Run the solution of each task, and an agent that does nothing, before anything trains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rl4llm.core.errors import RL4LLMError
from rl4llm.core.registry import from_extension
from rl4llm.core.schema import with_options
from rl4llm.extensions.tasks.grade import Tasks
from rl4llm.extensions.tasks.task import names_task, read_task


def try_tasks(
    rows: Iterable[Mapping[str, Any]], options: Mapping[str, Any], tell: Callable[[str], None]
) -> list[str]:
    """Return the lines about tasks whose solution does not get 1, or whose untouched workspace does not get 0.

    A task is a directory with the row's column `files`. `options` are those of the workspaces, whose count bounds how many
    tasks run at once. `tell` gets each line as soon as it is known. Raises the workspaces' error if none opens.
    """
    tasks = {(row["task"], repr(row.get("files"))): row for row in rows if names_task(row)}
    if not tasks:
        return []
    workspaces = with_options("env.workspace", from_extension("workspaces", "check --task"), options)
    try:
        return asyncio.run(_try(workspaces, list(tasks.values()), tell))
    finally:
        workspaces.close()


async def _try(workspaces: Any, rows: list[Mapping[str, Any]], tell: Callable[[str], None]) -> list[str]:
    await (await workspaces.open()).close()  # a machine without an engine has one line, not one for each task
    tasks, lines = Tasks(workspaces), dict[str, None]()

    async def play(row: Mapping[str, Any], solved: bool) -> None:
        line = await _outcome(tasks, row, solved=solved)
        if line and line not in lines:
            lines[line] = None
            tell(line)

    await asyncio.gather(*(play(row, solved) for row in rows for solved in (True, False)))
    return [*lines]


async def _outcome(tasks: Tasks, row: Mapping[str, Any], *, solved: bool) -> str:
    """Return a line about the reward of the solution, or of doing nothing; "" if it is as it should be."""
    try:
        if solved and read_task(Path(row["task"])).solution is None:
            return ""
        workspace = await tasks.open(row)
        try:
            await workspace.place(row.get("files"))
            if solved:
                await tasks.solve(row, workspace)
            verdict = await tasks.grade(row, workspace)
        finally:
            await workspace.close()
    except RL4LLMError as error:
        place = f"{row['task']}: "
        return place + str(error).removeprefix(place)
    if verdict.reward == solved:
        return ""
    who = "the solution" if solved else "doing nothing"
    return f"{row['task']}: {who} gets {verdict.reward:g}, not {solved:d}. {verdict.printed}"
