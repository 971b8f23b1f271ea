"""Writes small tasks in the forms of Harbor and Terminal-Bench."""

import zipfile
from pathlib import Path

import pytest

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


def import_pytest_from(file: Path) -> None:
    """Write pytest and what it imports to a zip file, for a Python that has none."""
    site = Path(pytest.__file__).parents[1]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in ("_pytest", "pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            for path in sorted((site / package).rglob("*.py")):
                archive.write(path, path.relative_to(site))
