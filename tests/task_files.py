"""Writes small tasks in the forms of Harbor and Terminal-Bench, and plays episodes in them."""

import asyncio
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from rl4llm.extensions.tasks.grade import Tasks
from rl4llm.extensions.tasks.verdict import Verdict
from rl4llm.extensions.workspaces import Workspaces

SOLVE = "echo 4 > /answer\n"
TEST = '[ "$(cat /answer)" = 4 ]\necho $((! $?)) > /logs/verifier/reward.txt\n'
HARBOR = {
    "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 20.0\n[agent]\ntimeout_sec = 20.0\n',
    "instruction.md": "Write 2 + 2 to /answer.\n",
    "tests/test.sh": TEST,
    "solution/solve.sh": SOLVE,
}
TERMINAL_BENCH = {
    "task.yaml": "instruction: Write 2 + 2 to /answer.\ndifficulty: easy\nparser_name: pytest\nmax_test_timeout_sec: 20\n",
    "run-tests.sh": '[ "$(cat /answer)" = "$(cat $TEST_DIR/expected)" ]\n',
    "tests/expected": "4\n",
    "solution.sh": SOLVE,
}


def write_task(directory: Path, files: dict[str, str] = HARBOR, **changes: str | None) -> Path:
    """Write the files of a task; `changes` replace files, by name with _ for / and . in it, and None leaves one out."""
    names = {name.replace("/", "_").replace(".", "_"): name for name in files}
    texts = files | {names.get(key, key): text for key, text in changes.items()}
    for name, text in texts.items():
        if text is not None:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
    return directory


def graded(task: Path, *episode: str) -> Verdict:
    """Return the verdict of an episode whose commands run in a shell each."""
    return asyncio.run(_verdicts(task, episode))[-1]


def grades(task: Path, *parts: str) -> list[float]:
    """Return the reward after each command of an episode."""
    return [verdict.reward for verdict in asyncio.run(_verdicts(task, *([part] for part in parts)))]


async def _verdicts(task: Path, *parts: Sequence[str]) -> list[Verdict]:
    pool = Workspaces()
    tasks, row, verdicts = Tasks(pool), {"task": str(task)}, []
    workspace = await tasks.open(row)
    try:
        for commands in parts:
            for command in commands:
                await workspace.run(["sh", "-c", command], wall_s=20)
            verdicts.append(await tasks.grade(row, workspace))
        return verdicts
    finally:
        await workspace.close()
        pool.close()


def import_pytest_from(file: Path) -> None:
    """Write pytest and what it imports to a zip file, for a Python that has none."""
    site = Path(pytest.__file__).parents[1]
    names = ("_pytest", "pytest", "pluggy", "iniconfig", "packaging", "pygments", "py.py")
    paths = [
        path
        for name in names
        for path in (site / name, *sorted((site / name).rglob("*.py")))
        if path.is_file()
    ]
    lexers = ("__init__.py", "_mapping.py", "python.py", "diff.py", "special.py", "data.py")
    with zipfile.ZipFile(file, "w") as archive:
        for path in (*paths, *site.glob("pluggy-*/METADATA")):
            if path.parent.name != "lexers" or path.name in lexers:
                archive.write(path, path.relative_to(site))
