"""What an agent did in an episode: its conversations, the files that it changed, and what the tests found.

A run's files may hold anything; the diff, the names of tests and their output are written by the policy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rl4llm.extensions.view.index import token_ids_of
from rl4llm.extensions.view.texts import TokenTexts
from rl4llm.extensions.view.words import dicts_in

MOST = 20  # failed tests and files as text
LONGEST = 200  # characters of a name
HUNK = re.compile(r"@@ -\d+(?:,(\d{1,9}))? \+\d+(?:,(\d{1,9}))? @@")
KINDS = {"+": "added", "-": "removed", "\\": "head"}
RELATIONS = {
    "continues": "continues conversation {} after turn {}, compacted",
    "rewrites": "rewrites conversation {} after turn {}",
    "called": "called by conversation {} in turn {}",
}


def conversations(episode: Mapping[str, Any], texts: TokenTexts | None = None) -> list[dict[str, Any]]:
    """Return the token records of an episode that has several: the number of the record that each comes from, and how in
    words; how many turns it has; and what was read and written in turn, with `texts`."""
    forks, origins = (episode.get(name) for name in ("forks", "origins"))
    if not isinstance(forks, list) or not forks:
        return []
    origins = [None, *(origins if isinstance(origins, list) else ()), *[None] * len(forks)]
    texts = texts if texts and texts.loaded() else None  # looked for once, not for each turn
    rows = []
    for number, record in enumerate((episode.get("spans"), *forks)):
        parts = [*_parts(dicts_in(record), texts)]
        turns = sum(part["author"] == "policy" for part in parts)
        rows.append({**_source(origins[number], number), "turns": turns, "parts": parts})
    return rows


def changed_files(diff: Any) -> list[dict[str, Any]]:
    """Return the files of a unified diff: name, numbers of lines added and removed, and each line with its kind."""
    files: list[dict[str, Any]] = []
    old = new = 0  # lines that are left of a hunk
    for line in diff.removesuffix("\n").split("\n") if isinstance(diff, str) and diff else ():
        kind, hunk = "head", HUNK.match(line)
        if old > 0 or new > 0:
            kind = KINDS.get(line[:1], "same")
            old, new = old - (kind in ("removed", "same")), new - (kind in ("added", "same"))
        elif hunk:
            kind, (old, new) = "hunk", (int(count or 1) for count in hunk.groups())
        elif not files or line.startswith("diff ") or (line.startswith("--- ") and files[-1]["hunk"]):
            files.append(
                {"name": line.rpartition(" b/")[2], "added": 0, "removed": 0, "hunk": 0, "lines": []}
            )
        if kind == "head" and line.startswith(("--- ", "+++ ")) and not line.endswith("/dev/null"):
            files[-1]["name"] = re.sub(r"^[ab]/", "", line[4:].partition("\t")[0])
        if kind in files[-1]:
            files[-1][kind] += 1
        files[-1]["lines"].append([kind, line])
    return files


def in_lines(episode: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each conversation, for the tests, and for each of the first changed files."""
    for number, row in enumerate(conversations(episode), 1):
        yield f"conversation {number}{row['how'] and ' '}{row['how']}: {row['turns']} turn{'s' * (row['turns'] != 1)}"
    extras = episode.get("extras")
    task, diff = (extras.get(name) if isinstance(extras, dict) else None for name in ("task", "changes"))
    tests = task.get("tests") if isinstance(task, dict) else None
    if tests == {} and isinstance(task, dict):
        yield f"tests: reward {_short(str(task.get('reward')))}"
    elif isinstance(tests, dict):
        failed = [_short(name) for name, passed in tests.items() if passed is not True]
        names = ", ".join(_first(failed))
        yield f"tests: {len(tests) - len(failed)} of {len(tests)} passed{'; failed: ' * bool(failed)}{names}"
    files = changed_files(diff)
    yield from _first([f"changed {_short(one['name'])}: +{one['added']} -{one['removed']}" for one in files])


def _first(texts: Sequence[str]) -> list[str]:
    """Return the first texts, and how many more there are."""
    return [*texts[:MOST], *[f"and {len(texts) - MOST:,} more"] * (len(texts) > MOST)]


def _short(name: str) -> str:
    """Return the beginning of a name, in one line."""
    return " ".join(name[:LONGEST].split()) + "…" * (len(name) > LONGEST)


def _source(origin: Any, number: int) -> dict[str, Any]:
    """Return the number of the record that record `number` comes from, None if it is not known, and how in words."""
    record, turn, relation = (
        origin.get(name) if isinstance(origin, dict) else None for name in ("record", "turn", "relation")
    )
    if not isinstance(record, int) or not 0 <= record < number or str(relation) not in RELATIONS:
        return {"parent": None, "how": ""}
    return {"parent": record, "how": RELATIONS[str(relation)].format(record + 1, turn)}


def _parts(spans: Sequence[Mapping[str, Any]], texts: TokenTexts | None) -> Iterator[dict[str, Any]]:
    """Yield what one author wrote in turn; a turn that several versions of the weights wrote is one."""
    for author, run in groupby(spans, key=lambda span: str(span.get("author"))):
        ids = [*token_ids_of({"spans": [*run]})]
        yield {"author": author, "tokens": len(ids), "text": texts.joined(ids) if texts else ""}
