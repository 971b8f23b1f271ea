"""Which episodes there are and where each stands in its file, found without reading most of them.

An episode is a line of JSON that begins with what is short (see `rl4llm.tracking.episodes`), so its beginning is all that a
list of episodes needs. A file that a run is still writing to is read on from where it was left.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

CHUNK = 16 << 20  # bytes that are read at once; a longer line is read whole
FINITE = json.JSONDecoder(parse_constant=lambda _: None)  # one for all lines: to make one takes longer than to use it
SCALAR = (str, int, float)
NAME = re.compile(r"(step|eval)-(\d+)(-rank\d+)?\.jsonl")
SHORT_ENDS = b', "messages": ['
TEXT_ENDS = b', "spans": ['
COLUMNS = (
    "file", "set", "step", "prompt", "sample", "reward", "turns", "tokens", "stop", "mismatch", "role", "failure", "more"
)  # fmt: skip
KNOWN = {
    "step", "prompt_id", "sample", "reward", "turns", "tokens", "stop_reason", "mismatch", "role", "failure", "failure_class"
}  # fmt: skip


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    number: int
    kind: str
    inode: int
    read: int = 0  # bytes of whole lines


class EpisodeIndex:
    """The episodes of a run in the order in which they were found, newest files first.

        index = EpisodeIndex(Path("runs/x/episodes"))
        index.refresh()
        index.rows[0]        # values of COLUMNS
        index.episode(0)     # all of it

    `rows` only grows, until a file that was read is gone or replaced (a run that was resumed takes steps again): then it
    begins anew, with another `generation`. `pending` are bytes that were not looked at yet. May be asked by several threads.
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
        """Look for what is new; after `budget_s` seconds the rest waits for the next call."""
        with self._lock:
            deadline = time.monotonic() + budget_s
            todo = self._changed()
            self.pending = sum(size - file.read for file, size in todo)
            for file, size in todo:
                for offset, line in _lines(file.path, file.read, size):
                    self._take(file, offset, line)
                    if time.monotonic() > deadline:
                        break
                if time.monotonic() > deadline:
                    break
            self.pending = sum(max(0, size - file.read) for file, size in todo if _ends_line(file, size))

    def episode(self, number: int) -> dict[str, Any]:
        """All that is stored of an episode. Raises LookupError when it is there no longer."""
        return _parsed(self._line(number))

    def search(self, text: str, budget_s: float = 20.0) -> tuple[list[int], bool]:
        """Numbers of the episodes in which `text` was said, or is the answer, id or failure; whether all were looked at.

        Upper and lower case are one. A newer search ends an older one.
        """
        self._searches += 1
        mine, deadline = self._searches, time.monotonic() + budget_s
        found: list[int] = []
        needles = {json.dumps(form)[1:-1].encode().lower() for form in (text, text.lower(), text.upper())}
        for number, line in self._all():
            if mine != self._searches or time.monotonic() > deadline:
                return found, False
            said = line.partition(TEXT_ENDS)[0].lower()
            if any(needle in said for needle in needles) and text.lower() in _said(line):
                found.append(number)
        return found, True

    def _all(self) -> Iterator[tuple[int, bytes]]:
        """Every line that is still there, by the number of its row."""
        for file, numbered in groupby(enumerate(list(self._places)), key=lambda item: item[1][0]):
            try:
                with open(file.path, "rb") as opened:
                    for number, (_, offset, size) in numbered:
                        yield number, os.pread(opened.fileno(), size, offset)
            except OSError:
                continue

    def _changed(self) -> list[tuple[_File, int]]:
        """Files with bytes that were not read, the newest step first."""
        found: dict[str, os.stat_result] = {}
        named: dict[str, re.Match[str]] = {}
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    if match := NAME.fullmatch(entry.name):
                        found[entry.name], named[entry.name] = entry.stat(), match
        except OSError:
            pass  # no episodes are stored, or not yet
        if any(name not in found or _replaced(file, found[name]) for name, file in self._files.items()):
            self._start_anew()
        for name, stat in found.items():
            if name not in self._files:
                self._files[name] = _File(self.directory / name, len(self.names), named[name][1], stat.st_ino)
                self.names.append(name)
        newest = sorted(found, key=lambda name: (int(named[name][2]), name), reverse=True)
        return [(self._files[name], found[name].st_size) for name in newest if found[name].st_size > self._files[name].read]

    def _start_anew(self) -> None:
        self.generation += 1
        self.rows, self.names, self._places, self._files = [], [], [], {}

    def _take(self, file: _File, offset: int, line: bytes) -> None:
        self._places.append((file, offset, len(line)))
        self.rows.append(_row(file, line))
        file.read = offset + len(line)

    def _line(self, number: int) -> bytes:
        try:
            file, offset, size = self._places[number]
            with open(file.path, "rb") as opened:
                line = os.pread(opened.fileno(), size, offset)
        except (OSError, IndexError) as error:
            raise LookupError(f"episode {number} is there no longer") from error
        if len(line) != size or not line.endswith(b"\n"):
            raise LookupError(f"episode {number} was written anew")
        return line


def _lines(path: Path, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines from `start` on, with their offsets."""
    size = CHUNK
    try:
        with open(path, "rb") as file:
            while start < end:
                chunk = os.pread(file.fileno(), min(size, end - start), start)
                last = chunk.rfind(b"\n") + 1
                if not last:
                    if start + len(chunk) >= end:  # torn, or still being written
                        return
                    size *= 4
                    continue
                place = 0
                while place < last:
                    after = chunk.index(b"\n", place) + 1
                    yield start + place, chunk[place:after]
                    place = after
                start += last
    except OSError:
        return  # deleted meanwhile; the next refresh sees that


def _replaced(file: _File, stat: os.stat_result) -> bool:
    return stat.st_ino != file.inode or stat.st_size < file.read


def _ends_line(file: _File, size: int) -> bool:
    """Whether there is a whole line behind what was read."""
    try:
        with open(file.path, "rb") as opened:
            return os.pread(opened.fileno(), 1, size - 1) == b"\n"
    except OSError:
        return False


def _row(file: _File, line: bytes) -> list[Any]:
    short = _short(line)
    number = short.get
    more = {name: value for name, value in short.items() if name not in KNOWN and isinstance(value, SCALAR)}
    failure = short.get("failure_class") or ("unknown" if "failure" in short else "")
    return [
        file.number,
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
        more,
    ]


def _short(line: bytes) -> dict[str, Any]:
    """What stands before the messages; of records that older versions wrote, what can be counted in all of it."""
    end = line.find(SHORT_ENDS)
    if end > 0:
        try:
            short = FINITE.decode(line[:end].decode() + "}")
            if "turns" in short:
                return short
        except ValueError:
            pass  # the name stands in a value
    row = _parsed(line)
    spans = row.get("spans")
    spans = [span for span in spans if isinstance(span, dict)] if isinstance(spans, list) else []
    authors = ["context", *(span.get("author") for span in spans)]
    turns = sum(now == "policy" != before for before, now in pairwise(authors))
    tokens = sum(len(span.get("token_ids") or ()) for span in spans if span.get("author") == "policy")
    short = {name: value for name, value in row.items() if not isinstance(value, dict | list) and name != "ground_truth"}
    return {"turns": turns, "tokens": tokens, **{k: None if v in NOT_FINITE else v for k, v in short.items()}}


NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def _parsed(line: bytes) -> dict[str, Any]:
    """An episode, with numbers that are not finite as text, which JSON can hold; what is no JSON is a failure."""
    try:
        row = json.loads(line, parse_constant=str)
        if isinstance(row, dict):
            return row
    except (ValueError, RecursionError):
        pass
    return {"failure": "this line of the file is damaged", "failure_class": "damaged"}


def token_ids_of(episode: Mapping[str, Any]) -> Iterator[Any]:
    """Everything that stands where the ids of an episode's tokens should."""
    forks = episode.get("forks")
    for record in (episode.get("spans"), *(forks if isinstance(forks, list) else ())):
        for span in record if isinstance(record, list) else ():
            ids = span.get("token_ids") if isinstance(span, dict) else None
            yield from ids if isinstance(ids, list) else ()


def _said(line: bytes) -> str:
    """What a reader of the conversation sees, in lower case."""
    row = _parsed(line.partition(TEXT_ENDS)[0] + b"}")
    texts = [row.get("prompt_id"), row.get("failure"), row.get("ground_truth")]
    messages = row.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            texts += [message.get("content"), *map(json.dumps, message.get("tool_calls") or ())]
    return "\n".join(str(text) for text in texts if text is not None).lower()
