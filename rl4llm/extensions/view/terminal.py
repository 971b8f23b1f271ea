"""Runs as text, for a terminal without a browser: results, alerts, the main curves and a few episodes."""

from __future__ import annotations

import io
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from rl4llm.commands.output import show
from rl4llm.extensions.view.bands import described
from rl4llm.extensions.view.run import ViewedRun
from rl4llm.extensions.view.words import dicts_in
from rl4llm.runtime.terminal import Terminal, visible

Points = dict[int, float]  # by step

MAIN = (
    "eval/accuracy", "eval/reward/mean", "reward/mean", "accuracy", "eval/loss", "loss", "entropy", "surprise",
    "completion_length/mean", "truncated",
)  # fmt: skip
CURVES, EPISODES = 4, 4  # at most
HEIGHT, WIDEST = 8, 100  # lines and columns of a curve
FLAT = 1e-5  # what a loss differs by that is 0 up to rounding
LABELS = 12  # columns for the labels of a curve
LONGEST = 600  # characters of a message
COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")
MARKS = tuple("*o+x#%")  # instead of colours


def show_runs(runs: Sequence[ViewedRun]) -> None:
    """Print the runs; characters that the terminal cannot show become question marks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    for run in runs:
        run.index.refresh(budget_s=float("inf"))
    stories = [run.story() for run in runs]
    for run, story in zip(runs, stories, strict=True):
        show(Text(visible(f"{run.name}: {story['text']}"), style="bold"), visible(story["alerts"]), "")
    show(*_curves(runs))
    most = max(1, EPISODES // len(runs))
    for run, story in zip(runs, stories, strict=True):
        for one in (story["shown"] + story["suspicious"])[:most]:
            show(*_episode(run, one))


def _curves(runs: Sequence[ViewedRun]) -> Iterator[Text]:
    lines = _lines(runs)
    drawn: list[list[Points]] = []
    known = {name for points in lines.values() for name in points}
    # another program's metrics have other names
    for name in [name for name in MAIN if name in known] or sorted(known):
        series = {label: points[name] for label, points in lines.items() if len(points.get(name, ())) > 1}
        told = [*series.values()]
        flat = all(max(points.values()) - min(points.values()) <= FLAT for points in told)
        if not flat and told not in drawn and len(drawn) < CURVES:
            drawn.append(told)
            yield _curve(name, series)


def _curve(name: str, series: Mapping[str, Points]) -> Text:
    from uniplot import plot_to_string  # noqa: PLC0415 - only for drawing

    terminal = Terminal()
    marked = not terminal.encoding.startswith("utf") or (len(series) > 1 and not terminal.color_system)
    text = plot_to_string(
        xs=[[*points] for points in series.values()],
        ys=[[*points.values()] for points in series.values()],
        lines=True,
        title=visible(", ".join([name, *series]) if len(series) == 1 else name),
        width=max(1, min(terminal.width, WIDEST) - LABELS),
        height=HEIGHT,
        color=list(COLOURS) if len(series) > 1 and not marked else False,
        character_set="ascii" if marked else "block",
        force_ascii_characters=list(MARKS),
        legend_labels=[visible(label) for label in series] if len(series) > 1 else None,
        y_gridlines=[],
        x_gridlines=[],
    )
    return Text.from_ansi(text + "\n")


def _lines(runs: Sequence[ViewedRun]) -> dict[str, dict[str, Points]]:
    """Return the points of each metric of each line: a run, or the mean over the seeds of a band."""
    bands: dict[int, list[ViewedRun]] = defaultdict(list)
    names: dict[int, str] = {}
    for run, about in zip(runs, described(runs), strict=True):
        bands[about["band"]].append(run)
        names[about["band"]] = about["band_name"]
    found = {}
    for band, members in bands.items():
        label = names[band] + (f" (mean of {len(members)} seeds)" if len(members) > 1 else "")
        found[label] = _mean([_points(run) for run in members])
    return found


def _points(run: ViewedRun) -> dict[str, Points]:
    found: dict[str, Points] = defaultdict(dict)
    for row in (row for part in run.parts() for row in part["rows"]):
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                found[name][int(row["step"])] = float(value)
    return found


def _mean(members: Sequence[Mapping[str, Points]]) -> dict[str, Points]:
    found = {}
    for name in {name for points in members for name in points}:
        given = [points[name] for points in members if name in points]
        steps = sorted({step for points in given for step in points})
        found[name] = {step: statistics.fmean(p[step] for p in given if step in p) for step in steps}
    return found


def _episode(run: ViewedRun, one: Mapping[str, Any]) -> Iterator[str | Text]:
    """Yield the lines of an episode of a story; a run's files may hold anything."""
    episode = run.index.episode(one["number"])
    yield Text(visible(f"{run.name}: {one['why']}"), style="bold")
    for message in dicts_in(episode.get("messages")):
        asks = message.get("role") != "tool"  # a tool's message has the call that it answers
        calls = [f"calls {json.dumps(call)}" for call in dicts_in(message.get("tool_calls")) if asks]
        said = "\n".join([*filter(None, [str(message.get("content") or "")]), *calls])
        yield f"{message.get('role')}: {_short(said)}"
    yield f"reward {episode.get('reward')}, {episode.get('stop_reason')}\n"


def _short(text: str) -> str:
    left = len(text) - LONGEST
    return f"{text[:LONGEST]} … {left:,} more characters" if left > 0 else text
