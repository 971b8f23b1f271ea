"""What happened in a run: from where to where, in how many steps and how long, and a few episodes that show it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
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


@dataclass(slots=True)
class Totals:
    """What a headline needs of the metrics; `add` takes new rows only."""

    seconds: float = 0.0
    step: int = 0
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.step = max(self.step, int(row["step"]))
            self.seconds += sum(_number(row.get(phase)) or 0.0 for phase in PHASES)
            for name in OUTCOMES:
                if (value := _number(row.get(name))) is not None:
                    self.values[name].append(value)


def headline(totals: Totals, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sentence of a run, that of its alerts, and its steps."""
    config = about["config"]
    steps = f"{totals.step:,} step{'s' * (totals.step != 1)}"
    outcome = _outcome(totals)
    facts = [f"{outcome} in {steps}" if outcome else steps]
    facts[0] += " so far" * about["running"]
    if totals.seconds:
        facts.append(duration(totals.seconds))
    model = str(config.get("model.path") or "")
    if model and "${" not in model:  # a variable of the environment, of which only its name is stored
        facts.append(PurePath(model.removesuffix("/model")).name)  # of a run, its name
    if algorithm := str(config.get("algorithm.name") or ""):
        facts.append(algorithm.upper().replace("_", " "))
    text = ", ".join(facts)
    return {"text": text[:1].upper() + text[1:], "alerts": _alerts(about["alerts"]), "steps": totals.step}


def episodes(rows: Sequence[Sequence[Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the numbers of a few rows of the index, with the reason: what shows the run, and what looks suspicious."""
    listed = [{**dict(zip(COLUMNS, row, strict=True)), "number": number} for number, row in enumerate(rows)]
    scored = [row for row in listed if _number(row["reward"]) is not None and not row["failure"]]
    typical = _distinct(_typical(scored), SHOWN)
    suspicious = _distinct(_suspects(listed, scored), SUSPICIOUS)
    return {"shown": typical, "suspicious": suspicious}


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
        values = totals.values.get(name, [])
        if len(values) > 1:
            ends = ENDS if not name.startswith("eval/") and len(values) >= 2 * ENDS else 1
            text = _percent if "accuracy" in name else _plain
            begin, end = statistics.fmean(values[:ends]), statistics.fmean(values[-ends:])
            return f"{words} {text(begin)} \u2192 {text(end)}"
    return ""


def _alerts(alerts: Sequence[Mapping[str, Any]]) -> str:
    if not alerts:
        return "No alerts."
    spans = []
    for alert in alerts:
        begin, end = alert["since"], alert["until"]
        spans.append(
            f"{alert['name']} ({f'since step {begin}' if end is None else f'steps {begin} to {end}'})"
        )
    return f"{len(alerts)} alert{'s' * (len(alerts) > 1)}: {', '.join(spans)}."


def _typical(rows: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Yield an early and a late episode of a prompt, what is still wrong, and high rewards."""
    if pair := _pair([row for row in rows if row["set"] == "eval"]) or _pair(rows):
        for row, why in zip(pair, ("an early answer", "the same prompt"), strict=True):
            yield row, f"{why}, {_where(row)}: reward {_plain(row['reward'])}"
    evaluated = [row for row in rows if row["set"] == "eval" and isinstance(row["step"], int)]
    newest = max((row["step"] for row in evaluated), default=None)
    lowest, highest = (end((row["reward"] for row in rows), default=0.0) for end in (min, max))
    failures = [row for row in evaluated if row["step"] == newest and row["reward"] == lowest < highest]
    for row in failures[:1]:
        yield row, f"still wrong, {_where(row)}"
    for row in sorted(rows, key=lambda row: -row["reward"])[:SHOWN]:
        yield row, f"among the highest rewards, {_where(row)}"


def _pair(rows: Sequence[Row]) -> tuple[Row, Row] | None:
    """Return the worst row of the first step and the best of the last, of the prompt that gained most between them."""
    prompts: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if isinstance(row["step"], int):
            prompts[(row["prompt"], row["role"])].append(row)
    pairs = [
        tuple(end(group, key=lambda row: (row["step"], row["reward"])) for end in (min, max))
        for group in prompts.values()
    ]
    gains = [(new["reward"] - old["reward"], old, new) for old, new in pairs if old["step"] < new["step"]]
    gain, *pair = max(gains, key=lambda item: item[0], default=(0.0,))
    return (pair[0], pair[1]) if gain > 0 else None


def _suspects(listed: Sequence[Row], scored: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Yield the latest row of each kind, the kinds that point at a wrong reward first."""
    newest = sorted(scored, key=lambda row: -(row["step"] or 0))
    middle = statistics.median(row["reward"] for row in scored) if scored else 0.0
    lowest = min((row["reward"] for row in scored), default=0.0)
    high = [row for row in newest if row["reward"] >= middle and row["reward"] > lowest]
    differing = [row for row in scored if (_number(row["mismatch"]) or 0.0) > LARGE]
    for suspects, why in (
        ([row for row in high if row["odd"]], "a high reward for an odd answer"),
        ([row for row in high if row["stop"] in TRUNCATED], "a high reward for a truncated answer"),
        (sorted(differing, key=lambda row: -row["mismatch"]), MISMATCH),
        ([row for row in newest if row["odd"]], "an odd answer"),
        ([row for row in newest if row["stop"] in TRUNCATED], "a truncated answer"),
        ([row for row in listed if row["failure"]], "a failed attempt"),
    ):
        for row in suspects[:1]:
            yield row, f"{why}, {_where(row)}: {_detail(row, why)}"


def _detail(row: Row, why: str) -> str:
    if why == MISMATCH:
        return f"{_plain(row['mismatch'])} nats"
    if row["failure"]:
        return str(row["failure"])
    odd = f"it {row['odd']}" if row["odd"].startswith("repeats") else row["odd"]
    return ", ".join(filter(None, (odd, f"reward {_plain(row['reward'])}")))


def _distinct(cards: Iterator[tuple[Row, str]], most: int) -> list[dict[str, Any]]:
    reasons: dict[int, str] = {}
    for row, why in cards:
        reasons.setdefault(row["number"], why)
    return [{"number": number, "why": why} for number, why in islice(reasons.items(), most)]


def _where(row: Row) -> str:
    return f"{'held-out, ' if row['set'] == 'eval' else ''}step {row['step']}"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _percent(share: float) -> str:
    """Return a share in percent, such as 12.5 % or 50 %."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def _plain(value: float) -> str:
    return rounded(value, 3)
