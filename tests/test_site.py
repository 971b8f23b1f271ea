"""The site shows every page and every public name, and its links lead somewhere."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urldefrag

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


def test_front_page_lists_all_pages():
    """The link to the list on GitHub becomes the list."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"), edit_url="")
    text = docs_site.on_page_markdown((ROOT / "docs" / "index.md").read_text(), page, None, None)
    assert "[get started](get_started.md)" in text and "(README.md)" not in text


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


def test_summary_is_the_first_sentence_of_a_page():
    page = "# Title\n\n```bash\nA command.\n```\n\n| a | table |\n|---|---|\n\nThe [first](x.md) one\nhere. Another.\n"
    assert docs_site.summary(page) == "The first one here."


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site; without the extra `docs` the workflow docs.yml alone builds it."""
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}; pip install -e '.[docs]' brings them")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "GITHUB_REF_NAME": "main"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return target


class Seen(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes.get("id")}
        self.links += filter(None, [attributes.get("href"), attributes.get("src")])


def test_links_of_the_built_site_lead_somewhere(site):
    pages = {page: Seen(page.read_text()) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 20
    for page, seen in pages.items():
        for link in seen.links:
            path, heading = urldefrag(unquote(link))
            if re.match(r"\w+:", path):
                assert path.startswith(("https://", "data:")), (page, link)
                _exists_in_repository(path)
                continue
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), (page, link)
            assert not heading or target not in pages or heading in pages[target].anchors, (page, link)


def _exists_in_repository(link):
    found = re.match(f"{docs_site.REPOSITORY}/(?:blob|tree|edit)/main/(.*)", link)
    assert not found or (ROOT / found[1]).exists(), link


def test_llms_txt_lists_every_page_with_a_sentence(site):
    lines = (site / "llms.txt").read_text().splitlines()
    nav = list(listed(yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)["nav"]))
    entries = [re.fullmatch(r"- \[.+\]\((.*)\): (.{10,})", line) for line in lines if line.startswith("- ")]
    assert all(entries) and len(entries) == len(nav)
    assert all((site / entry[1] / "index.html").exists() for entry in entries)
    assert "# Environments" in (site / "llms-full.txt").read_text()


def test_options_and_doctests_become_lists_and_code(site):
    page = (site / "api" / "algorithms" / "index.html").read_text()
    assert re.search(r"<li>\s*(?:<p>)?<strong><code>clip_low, clip_high</code></strong>", page)
    registry = (site / "api" / "contracts" / "index.html").read_text()
    assert "blockquote" not in registry and "Registry" in registry
