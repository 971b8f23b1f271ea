"""The rewards of each step as a histogram."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from rl4llm.extensions.view.index import COLUMNS

SET, STEP, REWARD, MORE = (COLUMNS.index(name) for name in ("set", "step", "reward", "more"))
LEVELS, BINS, MOST_COLUMNS = 12, 16, 120


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
