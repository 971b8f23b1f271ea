"""What surrounds training can be deleted: the library never imports it, and works without any one of it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from without_extensions import PREFIX, ROOT, extensions

PACKAGE = ROOT / "rl4llm"


def imported(path: Path, text: str) -> set[str]:
    """Return the modules and names that a file imports anywhere in it, relative ones with their full name."""
    package, found = [*path.relative_to(ROOT).parent.parts], set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            found |= {".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names}
    return found


def into_extensions(path: Path, text: str) -> list[str]:
    return sorted(name for name in imported(path, text) if f"{name}.".startswith(PREFIX))


def test_the_library_never_imports_an_extension():
    library = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "extensions")]
    assert len(library) > 150
    found = {str(path): into_extensions(path, path.read_text(encoding="utf-8")) for path in library}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import rl4llm.extensions.view",
        "from rl4llm import extensions",
        "from rl4llm.extensions import view",
        "def run():\n    from rl4llm.extensions.view.run import find_runs",
        "if TYPE_CHECKING:\n    from ..extensions.view import run",
        "from .. import extensions",
    ],
)
def test_an_import_of_an_extension_is_found_wherever_it_is(line):
    assert into_extensions(PACKAGE / "data" / "load.py", line)


@pytest.fixture(scope="module")
def without_each():
    """Return what the script prints: one process imports torch for all copies."""
    command = [sys.executable, "scripts/without_extensions.py"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800).stdout


def test_the_library_trains_without_any_extension(without_each):
    assert "library: works\n" in without_each, without_each


@pytest.mark.parametrize("name", extensions())
def test_everything_else_works_without_an_extension(without_each, name):
    assert f"{name}: works\n" in without_each, without_each
