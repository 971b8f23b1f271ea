"""Hooks of mkdocs.yml: pages that are not in docs/, links to files of the repository, and llms.txt.

A page of docs/ links to files of the repository as on GitHub. On the site such a link leads to the page that shows the file,
or to the file in the repository. The pages of the API list all public names, from the stubs beside the lazy `__init__.py`.
"""

from __future__ import annotations

import ast
import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from rl4llm.core.registry import provided

log = logging.getLogger("mkdocs.hooks.docs_site")
ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/michaelnny/rl4llm"
REF = os.environ.get("GITHUB_REF_NAME", "main")  # a branch, or the tag of a version

BORROWED = {
    "AGENTS.md": "agents.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "configs/README.md": "configs.md",
    "scripts/README.md": "scripts.md",
    "scripts/bench/README.md": "benchmarks.md",
}  # pages of the repository outside docs/, and what they are called on the site

TABLE = "docs/README.md"  # the list of pages on GitHub, and a part of the site's front page

PACKAGES = {
    "rl4llm": None,
    "rl4llm.rewards": "api/rewards.md",
    "rl4llm.envs": "api/environments.md",
    "rl4llm.envs.tools": "api/environments.md",
    "rl4llm.algorithms": "api/algorithms.md",
    "rl4llm.testing": "api/testing.md",
}  # packages that users import from, and the page of each; names of rl4llm are on the page that fits their module
GROUPS = {
    "rl4llm.envs": "api/environments.md",
    "rl4llm.tools": "api/environments.md",
    "rl4llm.rewards": "api/rewards.md",
}  # what extensions add to these tables, and the page of it
BASES = (
    "rl4llm.api.PolicyTrainer",
    "rl4llm.extensions.judges.judges.BaseJudge",
    "rl4llm.algorithms.policy_gradient.PolicyGradient",
)  # of what users import
CONTRACTS = (
    "rl4llm.core.base_algorithm.BaseAlgorithm",
    "rl4llm.core.base_algorithm.Needs",
    "rl4llm.core.base_algorithm.Critic",
    "rl4llm.core.base_backend.BaseBackend",
    "rl4llm.core.base_backend.BaseAdapter",
    "rl4llm.core.base_client.BaseClient",
    "rl4llm.core.base_client.BasePublisher",
    "rl4llm.tracking.tracker.Tracker",
    "rl4llm.core.registry.Registry",
)
API = {  # page: title, what it says first, and modules of names of rl4llm; a name is on the first page that fits
    "api/trainers.md": (
        "Trainers",
        "A trainer builds a run from Python objects or from a configuration.",
        ("rl4llm.api.", "rl4llm.config."),
    ),
    "api/rewards.md": (
        "Rewards",
        "Rewards score episodes. [Rewards](../rewards.md) says how to write one, and whose fault scores 0.",
        ("rl4llm.rewards.", "rl4llm.core.base_env.BaseRewardFunction", "rl4llm.core.tables.REWARDS",
         "rl4llm.core.tables.register_reward", "rl4llm.extensions.judges."),
    ),
    "api/environments.md": (
        "Environments",
        "The policy acts in an environment. [Environments](../environments.md) shows the ways to write one.",
        ("rl4llm.core.base_env.", "rl4llm.core.base_opponent.", "rl4llm.core.types.ChatMessage", "rl4llm.envs.tool.",
         "rl4llm.envs.tools.", "rl4llm.envs.roles.", "rl4llm.envs.debate.", "rl4llm.core.tables.ENVIRONMENTS",
         "rl4llm.core.tables.TOOLS", "rl4llm.core.tables.register_env", "rl4llm.core.tables.register_tool",
         "rl4llm.core.tables.register_opponent"),
    ),
    "api/algorithms.md": (
        "Algorithms",
        "An algorithm is a dataclass; its fields are the options of `algorithm` in a configuration. "
        "[Algorithms](../algorithms.md) compares the methods.",
        ("rl4llm.algorithms.", "rl4llm.core.tables."),
    ),
    "api/testing.md": ("Testing", "Checks for environments and clients, and a client that answers from a script.", ()),
    "api/contracts.md": (
        "Contracts",
        "The base classes that every part of a run implements.",
        ("rl4llm.trainers.base_trainer.", *CONTRACTS),
    ),
    "api/loop.md": (
        "Parts of a loop",
        "A training loop in plain Python uses these parts, as `examples/loop.py` does.",
        ("rl4llm.",),
    ),
}  # fmt: skip


def public_names() -> dict[str, str]:
    """Return where each public name is defined, and the path that users import it by."""
    paths = {home: home for home in (*BASES, *CONTRACTS)}
    for package in PACKAGES:
        file = ROOT / package.replace(".", "/") / "__init__.pyi"
        for node in ast.parse((file if file.exists() else file.with_suffix(".py")).read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module != "rl4llm.core.registry":
                for alias in node.names:
                    paths.setdefault(f"{node.module}.{alias.name}", f"{package}.{alias.name}")
    return paths | {home: home for home in _of_extensions()}


def _of_extensions() -> dict[str, str]:
    """Return the page of each name that extensions add."""
    return {
        path.replace(":", "."): page
        for group, page in GROUPS.items()
        for path in provided(group).values()
        if path.startswith("rl4llm.")
    }


def api_pages() -> dict[str, str]:
    """Return the text of each page of the API."""
    names: dict[str, list[str]] = {page: [] for page in API}
    for home, path in public_names().items():
        page = _of_extensions().get(home) or PACKAGES.get(path.rpartition(".")[0])
        names[page or next(page for page, (_, _, homes) in API.items() if home.startswith(homes))].append(
            path
        )
    pages = {}
    for page, (title, first, _) in API.items():
        shown = "\n\n".join(f"::: {path}" for path in names[page])
        pages[page] = f"# {title}\n\n{first}\n\n{shown}\n"
    rows = "\n".join(f"| [{API[page][0]}]({page[4:]}) | {', '.join(_links(names[page]))} |" for page in API)
    pages["api/index.md"] = (
        f"# API\n\nNames are shown with the path to import them by.\n\n| page | names |\n|---|---|\n{rows}\n"
    )
    return pages


def _links(paths: list[str]) -> list[str]:
    return [f"[`{path.rpartition('.')[2]}`][{path}]" for path in paths]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for page, text in api_pages().items():
        files.append(File.generated(config, page, content=text))
    for source, page in BORROWED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links of a page at the pages and files that they mean."""
    site = page.file.src_uri
    if site == "index.md":
        table = (ROOT / TABLE).read_text(encoding="utf-8").partition("\n")[2]
        markdown = markdown.replace("[All pages](README.md)", table)
    source = next((name for name, borrowed in BORROWED.items() if borrowed == site), f"docs/{site}")
    if source in BORROWED:
        page.edit_url = f"{REPOSITORY}/edit/main/{source}"
    elif site.startswith("api/"):
        page.edit_url = None
        return markdown
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [
        re.sub(r"(?<=\]\()(?!\w+:|#)([^)\s]+)", lambda link: point(source, site, link[1]), text)
        for text in parts[::2]
    ]
    return "".join(parts)


def point(source: str, site: str, target: str) -> str:
    """Return what a link of the file `source`, which is the page `site`, has to be on the site."""
    path, mark, heading = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / path).exists():
        log.warning("%s links to %s, which does not exist", source, target)
    page = path.removeprefix("docs/") if path.startswith("docs/") else BORROWED.get(path)
    if page is None:
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{REPOSITORY}/{kind}/{REF}/{path}{mark}{heading}"
    page = "index.md" if path == TABLE else page
    return posixpath.relpath(page, posixpath.dirname(site) or ".") + mark + heading


def on_nav(nav: Any, config: Any, files: Any) -> None:
    """Remember the order of the pages for llms.txt."""
    config.extra["pages"] = nav.pages


def on_post_build(config: Any) -> None:
    """Write llms.txt, the list of pages for language models, and llms-full.txt, the text of all pages but the API."""
    pages = config.extra.pop("pages")
    text = [f"# {config.site_name}\n\n> {config.site_description}\n\n## Pages\n"]
    text += [
        f"- [{page.title}]({page.canonical_url or page.url or './'}): {summary(page.markdown)}"
        for page in pages
    ]
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    full = [page.markdown for page in pages if not page.url.startswith("api/")]
    (Path(config.site_dir) / "llms-full.txt").write_text("\n\n".join(full), encoding="utf-8")


def summary(markdown: str) -> str:
    """Return the first sentence of a page's first paragraph, without links."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    paragraph = next((part for part in re.split(r"\n\s*\n", text) if re.match(r"[A-Z`\[]", part)), "")
    plain = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=\.)\s", plain)[0]
