"""The contents of a run's directory: configuration, metrics, progress. Nothing is written there."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl4llm.core.errors import RunDirError
from rl4llm.core.redact import redacted
from rl4llm.extensions.view.index import EpisodeIndex
from rl4llm.extensions.view.story import Totals, episodes, headline
from rl4llm.extensions.view.texts import TokenTexts
from rl4llm.runs.lock import is_locked
from rl4llm.runs.run_dir import RunDir, dotted
from rl4llm.tracking.alerts import RULES
from rl4llm.tracking.glossary import find

OF_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)\}")
AT_ONCE = 64 << 20  # bytes of metrics in one answer
WATCHED = {rule.name: rule.metric for rule in RULES}
DEEPEST = 5  # levels below a directory of runs, such as runs/recipes/sums/full/seed-0/run
STILL_S = 120.0  # a run of another machine that wrote nothing for this long is not shown as running


class ViewedRun:
    """One run. `about` reports damaged files; the rest is shown."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name
        self._run = RunDir(path)
        self.index = EpisodeIndex(self._run.episodes_dir)
        self.texts = TokenTexts(path, self._model_path)
        self._totals, self._read = Totals(), 0
        self._chosen: tuple[tuple[int, int], dict[str, Any]] = (-1, -1), {}
        self._lock = threading.Lock()

    def about(self) -> dict[str, Any]:
        """Return name, path, identity, dotted configuration, warnings, whether it is running, and `_alerts`."""
        config, warnings = self._config()
        identity, problem = self._identity()
        return {
            "name": self.name,
            "path": str(self.path.absolute()),
            "run_id": str(identity.get("run_id", "")),
            "created": str(identity.get("created", "")),
            "version": str(identity.get("rl4llm", "")),
            "config": config,
            "warnings": warnings + problem,
            "max_steps": config.get("max_steps"),
            "running": self._running(),
            "alerts": self._alerts(),
        }

    def metrics(self, start: int = 0) -> dict[str, Any]:
        """Return rows of metrics.jsonl from byte `start`, the next byte, and the glossary's entries of their metrics.

        If the file was truncated before `start`, return all rows and set `reset`.
        """
        file = self._run.metrics_file
        try:
            with open(file, "rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                cut = start > size or (start > 0 and os.pread(opened.fileno(), 1, start - 1) != b"\n")
                start = 0 if cut else start
                data = os.pread(opened.fileno(), AT_ONCE, start)
        except OSError:
            return {"rows": [], "next": 0, "reset": start > 0, "damaged": 0, "glossary": {}}
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        rows = [row for row in map(_metrics_row, lines) if row]
        following = start + data.rfind(b"\n") + 1
        return {
            "rows": rows,
            "next": following,
            "reset": cut,
            "damaged": len(lines) - len(rows),
            "glossary": _glossary(rows),
        }

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield all of `metrics`, part by part."""
        start = 0
        while (part := self.metrics(start))["rows"]:
            yield part
            start = part["next"]

    def story(self) -> dict[str, Any]:
        """Return what happened so far, in words, and the numbers of a few episodes of this generation of the index."""
        with self._lock:
            while (part := self.metrics(self._read))["rows"] or part["reset"]:
                self._totals = Totals() if part["reset"] else self._totals
                self._totals.add(part["rows"])
                self._read = part["next"]
            state = self.index.generation, len(self.index.rows)
            if self._chosen[0] != state:
                self._chosen = state, episodes(self.index.rows[: state[1]])
            return {"generation": state[0], **headline(self._totals, self.about()), **self._chosen[1]}

    def _alerts(self) -> list[dict[str, Any]]:
        """Return each alert once: its name, what was seen, why it matters, its metric, and its first and last step."""
        alerts: list[dict[str, Any]] = []
        try:
            lines = self._run.alerts_file.read_bytes().splitlines()
        except OSError:
            return []
        for row in filter(None, map(_metrics_row, lines)):
            texts = {name: str(row.get(name, "")) for name in ("name", "seen", "why", "look_at")}
            if row.get("until") is None:
                metric = find(WATCHED.get(texts["name"], ""))
                about = metric.sentence() if metric else ""
                alerts.append({**texts, "metric": about, "since": row.get("since"), "until": None})
                continue
            for alert in alerts:
                if alert["name"] == texts["name"] and alert["until"] is None:
                    alert["until"] = row["until"]
        return alerts

    def _config(self) -> tuple[dict[str, Any], list[str]]:
        """Return all keys, since a run of another version has others, and warnings."""
        try:
            config = yaml.safe_load(self._run.config_file.read_text(encoding="utf-8"))
            if not isinstance(config, Mapping):
                return {}, ["config.yaml does not contain a configuration"]
            plain = str | int | float | None  # other values are shown as JSON
            return {
                key: value if isinstance(value, plain) else json.dumps(value, default=str)
                for key, value in dotted(redacted(config))
            }, []
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            return {}, [f"cannot read config.yaml: {' '.join(str(error).split())}"]

    def _identity(self) -> tuple[Mapping[str, Any], list[str]]:
        try:
            identity = json.loads(self._run.run_file.read_text())
            return (identity, []) if isinstance(identity, Mapping) else ({}, ["run.json is damaged"])
        except FileNotFoundError:
            return {}, []
        except (OSError, ValueError) as error:
            return {}, [f"run.json is damaged: {error}"]

    def _running(self) -> bool:
        if (locked := is_locked(self.path)) is not None:
            return locked
        try:
            silent = time.time() - self._run.metrics_file.stat().st_mtime
            return silent < STILL_S and not self._run.model_dir.exists()
        except OSError:
            return False

    def _model_path(self) -> str | None:
        path = self._config()[0].get("model.path")
        return os.path.expandvars(OF_ENVIRONMENT.sub(r"${\1}", path)) if isinstance(path, str) else None


def find_runs(paths: Sequence[str | os.PathLike[str]]) -> list[ViewedRun]:
    """Return the runs at these paths; each path is the directory of a run, or one with runs in it or below.

    Raises RunDirError for a path that is neither.
    """
    directories: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not (runs := _runs_below(path, DEEPEST)):
            what = "is not a directory" if path.exists() else "does not exist"
            what = "contains no run (no run.json, metrics.jsonl or episodes/)" if path.is_dir() else what
            raise RunDirError(f"{str(path)!r} {what}. Accepted: output.dir of a run, or a directory of runs.")
        for run in runs:
            directories.setdefault(run.resolve(), run)
    each = list(directories.values())
    return [ViewedRun(path, name) for path, name in zip(each, _names(each), strict=True)]


def _is_run(path: Path) -> bool:
    run = RunDir(path)
    try:
        return run.run_file.is_file() or run.metrics_file.is_file() or run.episodes_dir.is_dir()
    except OSError:
        return False  # no permission


def _runs_below(path: Path, levels: int) -> list[Path]:
    """Return the run at a path, or else those in its directories, at most `levels` below it.

    Only the links in the first directory are followed, since others may lead back.
    """
    if _is_run(path) or not levels:
        return [path] * _is_run(path)
    try:
        children = sorted(child for child in path.iterdir() if child.is_dir() and child.name[0] != ".")
    except OSError:
        return []
    if levels < DEEPEST:
        children = [child for child in children if not child.is_symlink()]
    return [run for child in children for run in _runs_below(child, levels - 1)]


def _names(paths: list[Path]) -> list[str]:
    """Return the ends of the paths, long enough to differ from each other."""
    parts = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(ends[-length:]) for ends in parts]
        if len(set(names)) == len(names):
            break
    return names


def _metrics_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int | float) else None


def _glossary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return meaning, as plain text, unit and healthy range of each metric of the rows that the glossary has."""
    return {
        name: {"meaning": metric.meaning.replace("`", ""), "unit": metric.unit, "healthy": metric.healthy}
        for name in dict.fromkeys(name for row in rows for name in row)
        if (metric := find(name))
    }
