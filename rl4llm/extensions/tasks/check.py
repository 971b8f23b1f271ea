"""Run the solution of each task, and an agent that does nothing, before anything trains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rl4llm.core.errors import RL4LLMError
from rl4llm.core.registry import from_extension
from rl4llm.extensions.tasks.grade import Tasks
from rl4llm.extensions.tasks.task import read_task


def check_tasks(rows: Iterable[Mapping[str, Any]], options: Mapping[str, Any]) -> list[str]:
    """Return a line for each task whose solution does not get 1, or whose untouched workspace does not get 0.

    `options` are those of the workspaces, whose count bounds how many tasks run at once. Raises the error of the workspaces
    if none can be opened.
    """
    tasks = {row["task"]: row for row in rows if "task_digest" in row}
    if not tasks:
        return []
    workspaces = from_extension("workspaces", "check --task")(**options)
    try:
        return asyncio.run(_check(workspaces, list(tasks.values())))
    finally:
        workspaces.close()


async def _check(workspaces: Any, rows: list[Mapping[str, Any]]) -> list[str]:
    await (await workspaces.open()).close()  # a machine without an engine has one line, not one for each task
    tasks = Tasks(workspaces)
    runs = [(row, solved) for row in rows for solved in (True, False)]
    faults = await asyncio.gather(*(_fault(tasks, row, solved=solved) for row, solved in runs))
    return [f"{row['task']}: {fault}" for (row, _), fault in zip(runs, faults, strict=True) if fault]


async def _fault(tasks: Tasks, row: Mapping[str, Any], *, solved: bool) -> str:
    """Return what is wrong with the reward of the solution, or of doing nothing; "" if nothing is."""
    if solved and read_task(Path(row["task"])).solution is None:
        return ""
    try:
        workspace = await tasks.open(row)
        try:
            if solved:
                await tasks.solve(row, workspace)
            verdict = await tasks.grade(row, workspace)
        finally:
            await workspace.close()
    except RL4LLMError as error:
        return str(error).removeprefix(f"{row['task']}: ")
    if verdict.reward == solved:
        return ""
    who = "the solution" if solved else "doing nothing"
    return f"{who} gets {verdict.reward:g}, not {solved:d}. {verdict.printed}"
