"""Runs as text, for a terminal without a browser: results, alerts, the main curves and a few episodes."""

from __future__ import annotations

import io
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl4llm.commands.output import show
from rl4llm.extensions.view.agent import in_lines
from rl4llm.extensions.view.bands import described
from rl4llm.extensions.view.run import ViewedRun
from rl4llm.extensions.view.words import dicts_in
from rl4llm.runtime.terminal import visible
from rl4llm.tracking.curve import bars, mean, points

MAIN = (
    "eval/accuracy", "eval/reward/mean", "reward/mean", "accuracy", "eval/loss", "loss", "entropy", "surprise",
    "completion_length/mean", "truncated",
)  # fmt: skip
EPISODES = 4  # at most
LONGEST = 600  # characters of a message


def show_runs(runs: Sequence[ViewedRun]) -> None:
    """Print the runs; characters that the terminal cannot show become question marks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    for run in runs:
        run.index.refresh(budget_s=float("inf"))
    stories = [run.story() for run in runs]
    for run, story in zip(runs, stories, strict=True):
        show(visible(f"{run.name}: {story['text']}"), visible(story["alerts"]), "")
    show(*_curves(runs), "")
    most = max(1, EPISODES // len(runs))
    for run, story in zip(runs, stories, strict=True):
        for item in (story["shown"] + story["suspicious"])[:most]:
            show(*_episode(run, item))


def _curves(runs: Sequence[ViewedRun]) -> Iterator[str]:
    """Yield a line for each main metric and each configuration: the mean over its seeds."""
    bands: dict[str, list[list[Mapping[str, Any]]]] = defaultdict(list)
    for run, about in zip(runs, described(runs), strict=True):
        bands[about["band_name"]].append([row for part in run.parts() for row in part["rows"]])
    names = {name for seeds in bands.values() for rows in seeds for row in rows for name in row} - {"step"}
    # another program's metrics have other names
    for name in [name for name in MAIN if name in names] or sorted(names):
        for band, seeds in bands.items():
            curve = mean([points(rows, name) for rows in seeds])
            if len({value for _, value in curve}) > 1:
                label = f"{band} (mean of {len(seeds)} seeds)" if len(seeds) > 1 else band
                yield visible(f"{name:<22} {bars(curve)}  {label}")


def _episode(run: ViewedRun, item: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of an episode of a story; a run's files may hold anything."""
    episode = run.index.episode(item["number"])
    yield visible(f"{run.name}: {item['why']}")
    for message in dicts_in(episode.get("messages")):
        asks = message.get("role") != "tool"  # a tool's message has the call that it answers
        calls = [f"calls {json.dumps(call)}" for call in dicts_in(message.get("tool_calls")) if asks]
        text = "\n".join([*filter(None, [str(message.get("content") or "")]), *calls])
        rest = f" … {len(text) - LONGEST:,} more characters" if len(text) > LONGEST else ""
        yield visible(f"{message.get('role')}: {text[:LONGEST]}{rest}")
    for line in in_lines(episode):
        yield visible(line)
    yield visible(f"reward {episode.get('reward')}, {episode.get('stop_reason')}\n")
