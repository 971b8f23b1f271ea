"""The site shows every page and every public name, and its links lead somewhere."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import docs_site
import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGES = ("", "rewards", "envs", "envs/tools", "algorithms", "testing")
MISSING = [
    name for name in ("mkdocs", "material", "mkdocstrings", "mike") if not importlib.util.find_spec(name)
]


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml without what only mkdocs knows."""


Settings.add_multi_constructor("", lambda loader, tag, node: None)


def listed(nav):
    """Return every page of a nav, sections included."""
    for entry in nav:
        target = entry if isinstance(entry, str) else next(iter(entry.values()))
        yield from [target] if isinstance(target, str) else listed(target)


def test_nav_lists_every_page_once():
    nav = list(listed(yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)["nav"]))
    written = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    written.remove("README.md")  # its table is a part of index.md
    assert sorted(nav) == sorted([*written, *docs_site.BORROWED.values(), *docs_site.api_pages()])


@pytest.mark.parametrize("package", PACKAGES)
def test_api_shows_every_public_name(package):
    stub = ROOT / "rl4llm" / package / "__init__.pyi"
    tree = ast.parse((stub if stub.exists() else stub.with_suffix(".py")).read_text())
    names = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    shown = re.findall(r"^::: ([\w.]+)$", "\n".join(docs_site.api_pages().values()), re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert names - {"lazy"} <= {path.rpartition(".")[2] for path in shown}


@pytest.mark.parametrize(
    ("source", "site", "target", "seen"),
    [
        ("docs/runs.md", "runs.md", "engines.md#a", "engines.md#a"),
        ("docs/runs.md", "runs.md", "view.png", "view.png"),
        ("docs/runs.md", "runs.md", "../SECURITY.md", "security.md"),
        ("AGENTS.md", "agents.md", "docs/README.md", "index.md"),
        ("docs/runs.md", "runs.md", "../setup.py", "https://github.com/michaelnny/rl4llm/blob/main/setup.py"),
        ("docs/runs.md", "runs.md", "../examples/package", "https://github.com/michaelnny/rl4llm/tree/main/examples/package"),
        ("scripts/bench/README.md", "benchmarks.md", "../../docs/figures.md", "figures.md"),
        ("CONTRIBUTING.md", "contributing.md", "README.md#x", "https://github.com/michaelnny/rl4llm/blob/main/README.md#x"),
    ],
)  # fmt: skip
def test_link_leads_to_a_page_or_to_the_repository(source, site, target, seen, monkeypatch):
    monkeypatch.setattr(docs_site, "REF", "main")
    assert docs_site.point(source, site, target) == seen


@pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; pip install -e '.[docs]' brings them"
)
def test_site_builds_without_a_warning_and_lists_every_page(tmp_path):
    """Without the extra `docs` the workflow docs.yml alone builds it; --strict finds links that lead nowhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "GITHUB_REF_NAME": "main"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    lines = [line for line in (tmp_path / "llms.txt").read_text().splitlines() if line.startswith("- ")]
    entries = [re.fullmatch(r"- \[.+\]\((.*)\): (.{10,})", line) for line in lines]
    nav = list(listed(yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)["nav"]))
    assert len(entries) == len(nav) and all(
        (tmp_path / entry[1] / "index.html").exists() for entry in entries
    )
