"""The page with its data as one file that needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl4llm.extensions.view.bands import described
from rl4llm.extensions.view.choice import choose
from rl4llm.extensions.view.index import COLUMNS
from rl4llm.extensions.view.run import ViewedRun
from rl4llm.extensions.view.server import PAGE, episode_of
from rl4llm.runs.run_dir import write_atomically

PARTS = ("shown", "suspicious")  # of a story
MOST_BYTES = 128 << 20  # of episodes; browsers are slow with more
IMPORT = re.compile(r'from "\./(\w+)\.js"')


def export(runs: Sequence[ViewedRun], path: Path, episodes: int = 200) -> int:
    """Write the page of these runs, with at most `episodes` of each, see `choose`; return how many the file has.

    Raises RunDirError if the file cannot be written.
    """
    html, count = report(runs, episodes)
    write_atomically(path, html)
    return count


def report(runs: Sequence[ViewedRun], episodes: int) -> tuple[str, int]:
    """Return the page of these runs, with at most `episodes` of each, and how many it has."""
    abouts = described(runs)
    data = {"runs": [{"about": about, **_of(run, episodes)} for run, about in zip(runs, abouts, strict=True)]}
    return page(data), sum(len(run["rows"]) for run in data["runs"])


def page(data: dict[str, Any]) -> str:
    """Return the page with `data`, its modules and its styles in it."""
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    imports = json.dumps({"imports": {file.stem: _module(file) for file in _needed("main")}})
    start = 'import "main";'
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src data: "
    policy += f"{_hash(imports)} {_hash(start)}"
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{(PAGE / 'style.css').read_text(encoding='utf-8')}</style>\n"
        f'<script type="importmap">{imports}</script>'
    )
    body = f'<script type="application/json" id="data">{_safe(data)}</script>\n<script type="module">{start}</script>'
    return _between(_between(html, "head", head), "body", body)


def _needed(start: str) -> list[Path]:
    """Return the modules that the module `start` imports, with it."""
    modules, waiting = set(), {start}
    while waiting:
        name = waiting.pop()
        modules.add(name)
        waiting |= {*IMPORT.findall((PAGE / f"{name}.js").read_text(encoding="utf-8"))} - modules
    return [PAGE / f"{name}.js" for name in sorted(modules)]


def _of(run: ViewedRun, most: int) -> dict[str, Any]:
    run.index.refresh(budget_s=float("inf"))
    rows, size = run.index.rows, 0
    story = run.story()
    cards = [card["number"] for part in PARTS for card in story[part]]
    episodes: dict[int, dict[str, Any]] = {}
    for number in choose(rows, cards, most):
        episode = episode_of(run, number)
        size += len(json.dumps(episode))
        if size > MOST_BYTES:
            break
        episodes[number] = episode
    numbers = sorted(episodes)
    places = {number: place for place, number in enumerate(numbers)}
    for part in PARTS:
        story[part] = [
            {**card, "number": places[card["number"]]} for card in story[part] if card["number"] in places
        ]
    parts = list(run.parts())
    return {
        "metrics": [row for part in parts for row in part["rows"]],
        "glossary": {name: entry for part in parts for name, entry in part["glossary"].items()},
        "columns": COLUMNS,
        "rows": [rows[number] for number in numbers],
        "files": run.index.names,
        "episodes": [episodes[number] for number in numbers],
        "story": story,
        "all": len(rows),
    }


def _safe(data: Any) -> str:
    """Return JSON that cannot end the HTML element that contains it."""
    return json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _module(file: Path) -> str:
    """Return a module as a data URL; such modules can import each other only by bare names."""
    source = IMPORT.sub(r'from "\1"', file.read_text(encoding="utf-8"))
    return "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _between(html: str, part: str, text: str) -> str:
    """Replace the text between two comments of the page."""
    before, _, rest = html.partition(f"<!-- {part} -->")
    _, _, after = rest.partition(f"<!-- end of {part} -->")
    return before + text + after
