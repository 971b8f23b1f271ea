"""The page and what it shows as one file that needs nothing else: no server, no network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl4llm.core.errors import RunDirError
from rl4llm.core.run_dir import write_atomically
from rl4llm.view.index import COLUMNS
from rl4llm.view.run import ViewedRun
from rl4llm.view.server import PAGE, episode_of

MOST_BYTES = 128 << 20  # of episodes; browsers take long for more
IMPORT = re.compile(r'from "\./(\w+)\.js"')


def export(runs: Sequence[ViewedRun], path: Path, episodes: int = 200) -> int:
    """Write the page of these runs, with the newest `episodes` of each; returns how many there are in the file.

    Raises RunDirError when the file cannot be written.
    """
    if path.is_dir():
        raise RunDirError(f"{str(path)!r} is a directory; give the name of a file, such as report.html.")
    data = {"runs": [_of(run, episodes) for run in runs]}
    write_atomically(path, page(data))
    return sum(len(run["rows"]) for run in data["runs"])


def page(data: dict[str, Any]) -> str:
    """The page with `data` in it, and its modules and styles."""
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    imports = json.dumps({"imports": {file.stem: _module(file) for file in sorted(PAGE.glob("*.js"))}})
    start = 'import "main";'
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src data: "
    policy += f"{_hash(imports)} {_hash(start)}"
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{(PAGE / 'style.css').read_text(encoding='utf-8')}</style>\n"
        f'<script type="importmap">{imports}</script>'
    )
    body = f'<script type="application/json" id="data">{_safe(data)}</script>\n<script type="module">{start}</script>'
    html = _between(html, "head", head)
    return _between(html, "body", body)


def _of(run: ViewedRun, most: int) -> dict[str, Any]:
    run.index.refresh(budget_s=float("inf"))
    rows, taken, size = run.index.rows, [], 0
    newest = sorted(range(len(rows)), key=lambda number: rows[number][COLUMNS.index("step")] or 0, reverse=True)
    kept = []
    for number in newest[:most]:
        episode = episode_of(run, number)
        size += len(json.dumps(episode))
        if size > MOST_BYTES:
            break
        taken.append(episode)
        kept.append(rows[number])
    return {
        "about": run.about(),
        "metrics": list(_metrics(run)),
        "columns": COLUMNS,
        "rows": kept,
        "files": run.index.names,
        "episodes": taken,
        "all": len(rows),
    }


def _metrics(run: ViewedRun) -> Iterator[dict[str, Any]]:
    start = 0
    while (part := run.metrics(start))["rows"]:
        yield from part["rows"]
        start = part["next"]


def _safe(data: Any) -> str:
    """JSON in which nothing can end the element that it stands in."""
    return json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _module(file: Path) -> str:
    """A module as a data URL; such modules know each other by bare names alone."""
    source = IMPORT.sub(r'from "\1"', file.read_text(encoding="utf-8"))
    return "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _between(html: str, part: str, text: str) -> str:
    """The page with what stands between two comments replaced."""
    before, _, rest = html.partition(f"<!-- {part} -->")
    _, _, after = rest.partition(f"<!-- end of {part} -->")
    return before + text + after
