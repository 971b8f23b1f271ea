"""What surrounds training can be deleted: the library never imports or names it, and works without any one of it."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from sweeps import sampled
from without_extensions import PARTS, PREFIX, ROOT, extensions, registries

from rl4llm.core.registry import manifests

PACKAGE = ROOT / "rl4llm"
EXTRAS = {
    file.parent.name: tomllib.loads(file.read_text(encoding="utf-8"))["project"]["entry-points"]
    for file in (ROOT / "extras").glob("*/pyproject.toml")
}
LIBRARY = [
    path
    for path in PACKAGE.rglob("*.py*")
    if not path.is_relative_to(PACKAGE / "extensions") and path.suffix != ".pyc"
]


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
    assert len(LIBRARY) > 150
    found = {str(path): into_extensions(path, path.read_text(encoding="utf-8")) for path in LIBRARY}
    assert {path: names for path, names in found.items() if names} == {}


def naming(pattern: str) -> list[str]:
    """Return the lines of the library that a pattern is found in."""
    lines = [(path, line) for path in LIBRARY for line in path.read_text(encoding="utf-8").splitlines()]
    return [f"{path}: {line}" for path, line in lines if re.search(pattern, line)]


def test_the_library_names_no_extension():
    names = "|".join(extensions())
    # the pattern below is looked for in the right files
    assert naming(r"^from rl4llm\.core\.registry import")
    assert naming(rf"extensions[./\"', ]+({names})\b") == []
    assert naming(r"__path__") == []


def test_each_extension_has_a_manifest():
    assert sorted(manifests()) == extensions()


def test_a_manifest_adds_to_tables_that_the_library_has():
    known = registries(PACKAGE).keys() | {PARTS}
    added = {group for manifest in (*manifests().values(), *EXTRAS.values()) for group in manifest}
    assert added <= known and len(added) >= 10


def test_the_library_asks_for_the_parts_that_are_provided():
    asking = [*LIBRARY, *(PACKAGE / "extensions").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in asking)
    asked = set(re.findall(r"""from_extension\(\s*["'](\w+)["']""", text))
    asked |= set(re.findall(r"""provided\(PARTS\)\.get\("(\w+)"\)""", text))
    asked |= {f"answer_{kind}" for kind in re.findall(r"""elsewhere\("(\w+)",""", text)}
    assert asked == {
        part for manifest in (*manifests().values(), *EXTRAS.values()) for part in manifest.get(PARTS, ())
    }


def test_no_two_extensions_provide_one_name():
    pairs = [
        (group, name)
        for manifest in (*manifests().values(), *EXTRAS.values())
        for group in manifest
        for name in manifest[group]
    ]
    own = [(group, name) for group, table in registries(PACKAGE).items() if group for name in table.builtin]
    assert [pair for pair, count in Counter(pairs + own).items() if count > 1] == []


def test_the_library_knows_which_package_of_extras_has_a_name():
    known = [(group, table.extras) for group, table in registries(PACKAGE).items()]
    hints = {(group, name, package) for group, names in known for name, package in names.items()}
    assert hints == {
        (group, name, package)
        for package, groups in EXTRAS.items()
        for group in groups.keys() - {PARTS}
        for name in groups[group]
    }


@pytest.mark.parametrize(
    "package, line",
    [("compat", "run x.py --lr 1"), ("compat", "import x"), ("tinker", "serve tinker --help")],
)
def test_a_command_of_a_missing_package_names_it(package, line):
    code = f"""
import importlib.metadata, sys
importlib.metadata.entry_points = lambda group: []
from rl4llm.cli import main
sys.exit(main({line.split()}))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.endswith(f"pip install ./extras/{package}\n")


def test_manifests_are_read_without_importing_their_extensions():
    code = """
import sys
from rl4llm.core.registry import manifests
assert manifests()
sys.exit(' '.join(name for name in sys.modules if name.startswith('rl4llm.extensions')) or 0)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


# others use what these provide; tests/test_package.py reads the imports of all
SAMPLE = ("sandbox", "servers")


@pytest.fixture(scope="module")
def without_each(sweep):
    """Return what the script prints: one process imports torch for all copies."""
    command = [sys.executable, "tests/without_extensions.py", *(extensions() if sweep else SAMPLE)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800).stdout


def test_the_library_trains_without_any_extension(without_each):
    assert "library: works\n" in without_each, without_each


@pytest.mark.parametrize("name", sampled(extensions(), SAMPLE))
def test_everything_else_works_without_an_extension(without_each, name):
    assert f"{name}: works\n" in without_each, without_each
