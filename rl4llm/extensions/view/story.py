"""What happened in a run: from where to where, in how many steps and how long, and a few episodes that show it."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from rl4llm.core.types import TRUNCATED
from rl4llm.extensions.view.index import COLUMNS
from rl4llm.tracking.alerts import LARGE
from rl4llm.tracking.tracker import rounded

Row = Mapping[str, Any]

OUTCOMES = {
    "eval/accuracy": "held-out accuracy",
    "eval/dpo/accuracy": "held-out accuracy",
    "eval/rm/accuracy": "held-out accuracy",
    "eval/kto/accuracy": "held-out accuracy",
    "eval/reward/mean": "held-out reward",
    "eval/loss": "held-out loss",
    "eval/nll": "held-out loss",
    "accuracy": "training accuracy",
    "reward/mean": "training reward",
    "loss": "loss",
}
"""The first of these that a run has, twice or more, is its headline."""
ENDS = 5  # training steps that are averaged at either end
PHASES = ("time/step", "time/evaluate", "time/checkpoint")
SHOWN, SUSPICIOUS = 3, 2
MISMATCH = "the largest log-prob mismatch"
DROP = 0.02  # of the best value, from which on the headline names it too
SET, STEP, REWARD, MORE = (COLUMNS.index(name) for name in ("set", "step", "reward", "more"))
LEVELS, BINS, MOST_COLUMNS = 12, 16, 120


@dataclass(slots=True)
class Totals:
    """What a headline needs of the metrics; `add` takes new rows only."""

    seconds: float = 0.0
    step: int = 0
    values: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.step = max(self.step, int(row["step"]))
            self.seconds += sum(_number(row.get(phase)) or 0.0 for phase in PHASES)
            for name in OUTCOMES:
                if (value := _number(row.get(name))) is not None:
                    self.values[name].append((int(row["step"]), value))


def headline(totals: Totals, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sentence of a run, and its parts."""
    config = about["config"]
    parts = [_outcome(totals), f"{totals.step:,} step{'' if totals.step == 1 else 's'}"]
    parts[0] = f"{parts[0]} in {parts[1]}" if parts[0] else parts[1]
    told = [parts[0] + (" so far" if about["running"] else "")]
    if totals.seconds:
        told.append(duration(totals.seconds))
    model = str(config.get("model.path") or "")
    if model and "${" not in model:  # a variable of the environment, of which only its name is stored
        told.append(PurePath(model.removesuffix("/model")).name)  # of a run, its name
    if algorithm := str(config.get("algorithm.name") or ""):
        told.append(algorithm.upper().replace("_", " "))
    text = ", ".join(told)
    return {"text": text[:1].upper() + text[1:], "alerts": _alerts(about["alerts"]), "steps": totals.step}


def episodes(rows: Sequence[Sequence[Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the numbers of a few rows of the index, with the reason: what shows the run, and what looks suspicious."""
    listed = [{**dict(zip(COLUMNS, row, strict=True)), "number": number} for number, row in enumerate(rows)]
    scored = [row for row in listed if _number(row["reward"]) is not None and not row["failure"]]
    shown = _distinct(_typical(scored), SHOWN)
    suspicious = _distinct(_suspects(listed, scored), SUSPICIOUS)
    return {"shown": shown, "suspicious": suspicious}


def histogram(rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return `bins`, a list of [lowest, highest] reward, and `columns`, a list of [first step, last step, counts].

    Count the stored training episodes of the policy. With at most LEVELS different rewards each is a bin.
    """
    rewards: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        scored = (
            isinstance(row[REWARD], int | float)
            and math.isfinite(row[REWARD])
            and not row[MORE].get("frozen")
        )
        if scored and row[SET] == "step" and isinstance(row[STEP], int):
            rewards[row[STEP]].append(float(row[REWARD]))
    levels = sorted({reward for own in rewards.values() for reward in own})
    if len(levels) <= LEVELS:
        bins = [[level, level] for level in levels]
        place = {level: number for number, level in enumerate(levels)}
    else:
        width = levels[-1] / BINS - levels[0] / BINS
        bins = [[levels[0] + i * width, levels[0] + (i + 1) * width] for i in range(BINS)]
        place = {level: min(BINS - 1, int(level / width - levels[0] / width)) for level in levels}
    columns = []
    ordered, size = sorted(rewards), -(-len(rewards) // MOST_COLUMNS)
    for steps in (ordered[start : start + size] for start in range(0, len(ordered), size or 1)):
        counts = Counter(place[reward] for step in steps for reward in rewards[step])
        columns.append([steps[0], steps[-1], [counts[number] for number in range(len(bins))]])
    return {"bins": bins, "columns": columns}


def duration(seconds: float) -> str:
    """Return a duration in words.

    >>> duration(754), duration(8000)
    ('13 min', '2 h 13 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _outcome(totals: Totals) -> str:
    for name, words in OUTCOMES.items():
        points = totals.values.get(name, [])
        if len(points) > 1:
            values = [value for _, value in points]
            ends = ENDS if not name.startswith("eval/") and len(values) >= 2 * ENDS else 1
            first, last = statistics.fmean(values[:ends]), statistics.fmean(values[-ends:])
            shown = _percent if "accuracy" in name else _plain
            text = f"{words} {shown(first)} \u2192 {shown(last)}"
            step, best = max(points, key=lambda point: point[1])
            falls = "loss" not in words and ends == 1 and best - last > DROP * max(1.0, abs(best))
            return f"{text} (best {shown(best)} at step {step})" if falls else text
    return ""


def _alerts(alerts: Sequence[Mapping[str, Any]]) -> str:
    if not alerts:
        return "No alerts."
    spans = (f"{one['name']} ({_span(one)})" for one in alerts)
    return f"{len(alerts)} alert{'s' * (len(alerts) > 1)}: {', '.join(spans)}."


def _span(alert: Mapping[str, Any]) -> str:
    return (
        f"since step {alert['since']}"
        if alert["until"] is None
        else f"steps {alert['since']} to {alert['until']}"
    )


def _typical(rows: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Yield an early failure and a late success, what is still wrong, the best of a group that differs, and high rewards."""
    rewards = [row["reward"] for row in rows]
    lowest, highest = min(rewards, default=0.0), max(rewards, default=0.0)
    pair = _pair([row for row in rows if row["set"] == "eval"]) or _pair(rows)
    if pair:
        early, late = pair
        yield (
            early,
            f"{'an early failure' if early['reward'] == lowest else 'an early answer'}, {_where(early)}",
        )
        which = "the same prompt" if early["prompt"] == late["prompt"] else "another prompt"
        yield late, f"{which}, {_where(late)}: reward {_plain(late['reward'])}"
    evaluated = [row for row in rows if row["set"] == "eval" and isinstance(row["step"], int)]
    last = max((row["step"] for row in evaluated), default=None)
    wrong = [row for row in evaluated if row["step"] == last and row["reward"] == lowest < highest]
    if wrong:
        yield wrong[0], f"still wrong, {_where(wrong[0])}"
    mixed = _mixed(rows)
    if mixed:
        yield (
            max(mixed, key=lambda row: row["reward"]),
            f"the best of a group that differs, {_where(mixed[0])}",
        )
    for row in sorted(rows, key=lambda row: -row["reward"])[:SHOWN]:
        yield row, f"among the highest rewards, {_where(row)}"


def _pair(rows: Sequence[Row]) -> tuple[Row, Row] | None:
    """Return the worst row of the first and the best of the last step: of the prompt that gained most, else of all."""
    by_prompt: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_prompt[(row["prompt"], row["role"])].append(row)

    def gain(pair: tuple[Row, Row]) -> float:
        return float(pair[1]["reward"] - pair[0]["reward"])

    pairs = [pair for own in by_prompt.values() if (pair := _worst_and_best(own))]
    found = (max(pairs, key=gain, default=None), _worst_and_best(rows))
    return next((pair for pair in found if pair and gain(pair) > 0), None)


def _worst_and_best(rows: Sequence[Row]) -> tuple[Row, Row] | None:
    steps = {row["step"] for row in rows if isinstance(row["step"], int)}
    if len(steps) < 2:
        return None
    first, last = ([row for row in rows if row["step"] == end] for end in (min(steps), max(steps)))
    return min(first, key=lambda row: row["reward"]), max(last, key=lambda row: row["reward"])


def _mixed(rows: Sequence[Row]) -> list[Row]:
    """Return the training group whose rewards differ most, of the latest step with one that differs."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row["set"] == "step" and isinstance(row["step"], int):
            groups[(row["step"], row["file"], row["prompt"], row["role"])].append(row)
    differing = [own for own in groups.values() if len({row["reward"] for row in own}) > 1]
    return max(
        differing,
        key=lambda own: (own[0]["step"], statistics.pstdev(row["reward"] for row in own)),
        default=[],
    )


def _suspects(listed: Sequence[Row], scored: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Yield the latest row of each kind, the kinds that point at a wrong reward first."""
    newest = sorted(scored, key=lambda row: -(row["step"] or 0))
    middle = statistics.median(row["reward"] for row in scored) if scored else 0.0
    lowest = min((row["reward"] for row in scored), default=0.0)
    high = [row for row in newest if row["reward"] >= middle and row["reward"] > lowest]
    differing = [row for row in scored if (_number(row["mismatch"]) or 0.0) > LARGE]
    for found, why in (
        ([row for row in high if row["odd"]], "a high reward for an odd answer"),
        ([row for row in high if row["stop"] in TRUNCATED], "a high reward for a truncated answer"),
        (sorted(differing, key=lambda row: -row["mismatch"]), MISMATCH),
        ([row for row in newest if row["odd"]], "an odd answer"),
        ([row for row in newest if row["stop"] in TRUNCATED], "a truncated answer"),
        ([row for row in listed if row["failure"]], "a failed attempt"),
    ):
        for row in found[:1]:
            yield row, f"{why}, {_where(row)}: {_detail(row, why)}"


def _detail(row: Row, why: str) -> str:
    if why == MISMATCH:
        return f"{_plain(row['mismatch'])} nats"
    if row["failure"]:
        return str(row["failure"])
    odd = f"it {row['odd']}" if row["odd"].startswith("repeats") else row["odd"]
    return ", ".join(filter(None, (odd, f"reward {_plain(row['reward'])}")))


def _distinct(found: Iterator[tuple[Row, str]], most: int) -> list[dict[str, Any]]:
    taken: dict[int, str] = {}
    for row, why in found:
        if len(taken) < most:
            taken.setdefault(row["number"], why)
    return [{"number": number, "why": why} for number, why in taken.items()]


def _where(row: Row) -> str:
    return f"{'held-out, ' if row['set'] == 'eval' else ''}step {row['step']}"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _percent(share: float) -> str:
    """Return a share in percent, such as 12.5 % or 50 %."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def _plain(value: float) -> str:
    return rounded(value, 3)
