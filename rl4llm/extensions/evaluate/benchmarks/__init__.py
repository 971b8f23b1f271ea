"""Benchmarks that `rl4llm eval` measures by name: fixed prompts, fixed examples and fixed graders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl4llm.core.registry import Registry

Row = dict[str, Any]
Reader = Callable[[str], list[Row]]
"""Returns the stored rows of a split."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The definition of a benchmark. A change of anything that it fixes needs another `version`.

    Args:
        version: number of the definition; results of different versions cannot be compared.
        source: where the rows come from unless a user names another place, as in `data.path`.
        rows: makes the prompts, with `messages` and `ground_truth`, from the stored rows of the splits that it reads.
        rewards: the graders, as in a configuration. An attempt succeeds if the first one is at least 1.
        max_tokens: the most tokens of an answer.
        stop: strings that end an answer.
    """

    version: int
    source: str
    rows: Callable[[Reader], list[Row]]
    rewards: Sequence[Mapping[str, Any]]
    max_tokens: int
    stop: Sequence[str] = field(default=())

    def keys(self) -> dict[str, Any]:
        """Return the keys of a configuration that this definition fixes."""
        return {
            "eval.limit": None,
            "eval.temperature": 0.0,
            "rewards": [dict(reward) for reward in self.rewards],
            "rollout.max_tokens": self.max_tokens,
            "rollout.stop": list(self.stop),
        }


BENCHMARKS: Registry[Benchmark] = Registry(
    "benchmark",
    group="rl4llm.benchmarks",
    table={
        "gsm8k": "rl4llm.extensions.evaluate.benchmarks.gsm8k:GSM8K",
        "humaneval": "rl4llm.extensions.evaluate.benchmarks.humaneval:HUMANEVAL",
        "ifeval": "rl4llm.extensions.evaluate.benchmarks.ifeval:IFEVAL",
        "math500": "rl4llm.extensions.evaluate.benchmarks.math500:MATH500",
    },
)


def digest(rows: Sequence[Row]) -> str:
    """Return a hash of all prompts and ground truths, which is equal for results that can be compared."""
    prompts = [[row["messages"], row["ground_truth"]] for row in rows]
    text = json.dumps(prompts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
