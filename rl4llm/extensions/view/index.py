"""The episodes of a run and where each is in its file, found without parsing most of them.

An episode is a line of JSON that begins with its short fields (see `rl4llm.tracking.episodes`), so a list of episodes
needs only the beginning of each line. A file that a run is still writing is read from where the last read ended.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rl4llm.extensions.view.words import lines_of

CHUNK = 16 << 20  # bytes to read at once; a longer line is read whole
# one for all lines: creating one takes longer than using it
FINITE = json.JSONDecoder(parse_constant=lambda _: None)
SCALAR = (str, int, float)
NAME = re.compile(r"(step|eval)-(\d+)(-rank\d+)?\.jsonl")
SHORT_ENDS = b', "messages": ['
TEXT_ENDS = b', "spans": ['
COLUMNS = (
    "file", "line", "set", "step", "prompt", "sample", "reward", "turns", "tokens", "stop", "mismatch", "role", "failure",
    "more", "question", "answer", "odd"
)  # fmt: skip
KNOWN = {
    "step", "prompt_id", "sample", "reward", "turns", "tokens", "stop_reason", "mismatch", "role", "failure",
    "failure_class", "ground_truth",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    number: int
    kind: str
    inode: int
    read: int = 0  # bytes of complete lines
    lines: int = 0


class EpisodeIndex:
    """The episodes of a run in the order in which they were found, newest files first.

        index = EpisodeIndex(Path("runs/x/episodes"))
        index.refresh()
        index.rows[0]        # values of COLUMNS
        index.episode(0)     # all of it

    `rows` only grows, until a file is deleted or replaced, because a resumed run repeats steps. Then it starts again,
    with another `generation`. `pending` is the number of bytes not read yet. Several threads may use it.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.generation = 0
        self.pending = 0
        self.rows: list[list[Any]] = []
        self.names: list[str] = []
        self._places: list[tuple[_File, int, int]] = []
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()
        self._searches = 0

    def refresh(self, budget_s: float = 0.5) -> None:
        """Read what is new; after `budget_s` seconds the rest waits for the next call."""
        with self._lock:
            deadline = time.monotonic() + budget_s
            todo = self._changed()
            self.pending = sum(size - file.read for file, size in todo)
            for file, size in todo:
                for offset, line in _lines(file.path, file.read, size):
                    self._places.append((file, offset, len(line)))
                    self.rows.append(_row(file, line))
                    file.read, file.lines = offset + len(line), file.lines + 1
                    if time.monotonic() > deadline:
                        break
                if time.monotonic() > deadline:
                    break
            self.pending = sum(max(0, size - file.read) for file, size in todo if _ends_line(file, size))

    def episode(self, number: int) -> dict[str, Any]:
        """Return everything stored about an episode. Raises LookupError if it no longer exists."""
        return _parsed(self._line(number))

    def search(self, text: str, budget_s: float = 20.0) -> tuple[list[int], bool]:
        """Return the numbers of the episodes with `text` in any case, and whether all were searched.

        Messages, answers, ids and failures are searched. A newer search ends an older one.
        """
        self._searches += 1
        mine, deadline = self._searches, time.monotonic() + budget_s
        matches: list[int] = []
        needles = {json.dumps(form)[1:-1].encode().lower() for form in (text, text.lower(), text.upper())}
        for number, line in self._all():
            if mine != self._searches or time.monotonic() > deadline:
                return matches, False
            texts = line.partition(TEXT_ENDS)[0].lower()
            if any(needle in texts for needle in needles) and text.lower() in _said(line):
                matches.append(number)
        return matches, True

    def _all(self) -> Iterator[tuple[int, bytes]]:
        """Yield every line that still exists, with the number of its row."""
        for file, numbered in groupby(enumerate(list(self._places)), key=lambda item: item[1][0]):
            try:
                with open(file.path, "rb") as opened:
                    for number, (_, offset, size) in numbered:
                        yield number, os.pread(opened.fileno(), size, offset)
            except OSError:
                continue

    def _changed(self) -> list[tuple[_File, int]]:
        """Return files with new bytes, the newest step first."""
        stats: dict[str, os.stat_result] = {}
        kinds: dict[str, tuple[int, str]] = {}  # the step, and step or eval
        with suppress(OSError), os.scandir(self.directory) as entries:  # no episodes are stored, or none yet
            for entry in entries:
                if match := NAME.fullmatch(entry.name):
                    stats[entry.name], kinds[entry.name] = entry.stat(), (int(match[2]), match[1])
        for name, file in self._files.items():
            new = stats.get(name)
            if new is None or new.st_ino != file.inode or new.st_size < file.read:  # deleted, or replaced
                self.generation += 1
                self.rows, self.names, self._places, self._files = [], [], [], {}
                break
        for name, stat in stats.items():
            if name not in self._files:
                self._files[name] = _File(self.directory / name, len(self.names), kinds[name][1], stat.st_ino)
                self.names.append(name)
        newest = sorted(stats, key=lambda name: (kinds[name][0], name), reverse=True)
        files = [(self._files[name], stats[name].st_size) for name in newest]
        return [(file, size) for file, size in files if size > file.read]

    def _line(self, number: int) -> bytes:
        try:
            file, offset, size = self._places[number]
            with open(file.path, "rb") as opened:
                line = os.pread(opened.fileno(), size, offset)
        except (OSError, IndexError) as error:
            raise LookupError(f"episode {number} no longer exists") from error
        if len(line) != size or not line.endswith(b"\n"):
            raise LookupError(f"episode {number} was rewritten")
        return line


def _lines(path: Path, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield complete lines from `start`, with their offsets."""
    size = CHUNK
    try:
        with open(path, "rb") as file:
            while start < end:
                chunk = os.pread(file.fileno(), min(size, end - start), start)
                end_of_line = chunk.rfind(b"\n") + 1
                if not end_of_line:
                    if start + len(chunk) >= end:  # incomplete, or still being written
                        return
                    size *= 4
                    continue
                place = 0
                while place < end_of_line:
                    after = chunk.index(b"\n", place) + 1
                    yield start + place, chunk[place:after]
                    place = after
                start += end_of_line
    except OSError:
        return  # deleted meanwhile; the next refresh notices that


def _ends_line(file: _File, size: int) -> bool:
    """Return whether the new bytes end with a complete line."""
    try:
        with open(file.path, "rb") as opened:
            return os.pread(opened.fileno(), 1, size - 1) == b"\n"
    except OSError:
        return False


def _row(file: _File, line: bytes) -> list[Any]:
    short = _short(line)
    number = short.get
    details = {
        name: value for name, value in short.items() if name not in KNOWN and isinstance(value, SCALAR)
    }
    failure = short.get("failure_class") or ("unknown" if "failure" in short else "")
    return [
        file.number,
        file.lines,
        file.kind,
        number("step"),
        str(number("prompt_id", "")),
        number("sample"),
        number("reward"),
        number("turns"),
        number("tokens"),
        str(number("stop_reason") or ""),
        number("mismatch"),
        str(number("role") or ""),
        str(failure),
        details,
        *lines_of(_messages(line), number("turns")),
    ]


def _messages(line: bytes) -> Any:
    """Return the messages of an episode, without parsing its tokens."""
    start = line.find(SHORT_ENDS)
    if start < 0:
        return _parsed(line).get("messages")
    text = line[start + len(SHORT_ENDS) - 1 : line.find(TEXT_ENDS) + 1 or None].decode(errors="replace")
    try:
        return FINITE.raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None  # the name is inside a value, or the line is damaged


def _short(line: bytes) -> dict[str, Any]:
    """Return the fields before the messages; all fields of a line that another program wrote."""
    end = line.find(SHORT_ENDS)
    if end > 0:
        try:
            return FINITE.decode(line[:end].decode() + "}")
        except ValueError:
            pass  # the name is inside a value
    return _parsed(line)


def _parsed(line: bytes) -> dict[str, Any]:
    """Return an episode, with numbers that are not finite as strings; a line that is not JSON becomes a failure."""
    try:
        row = json.loads(line, parse_constant=str)
        if isinstance(row, dict):
            return row
    except (ValueError, RecursionError):
        pass
    return {"failure": "this line of the file is damaged", "failure_class": "damaged"}


def token_ids_of(episode: Mapping[str, Any]) -> Iterator[Any]:
    """Yield all token ids of an episode, in whatever type the file has."""
    forks = episode.get("forks")
    for record in (episode.get("spans"), *(forks if isinstance(forks, list) else ())):
        for span in record if isinstance(record, list) else ():
            ids = span.get("token_ids") if isinstance(span, dict) else None
            yield from ids if isinstance(ids, list) else ()


def _said(line: bytes) -> str:
    """Return the text that a reader of the conversation sees, in lower case."""
    head, long, _ = line.partition(TEXT_ENDS)
    row = _parsed(head + b"}" if long else line)
    texts = [row.get("prompt_id"), row.get("failure"), row.get("ground_truth")]
    messages = row.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            texts += [message.get("content"), *map(json.dumps, message.get("tool_calls") or ())]
    return "\n".join(str(text) for text in texts if text is not None).lower()
