"""GRPO that explores: it draws the samples of a prompt at different temperatures and top-p."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from rl4llm.algorithms.grpo import GRPO
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import Positive, Share


@dataclass(slots=True)
class ExploreGRPO(GRPO):
    """Draw sample i of a prompt at the i-th temperature and top-p; both lists repeat from the beginning.

    The policy that learns is still the one at `rollout.temperature`. Truncated importance sampling (`correction`) weighs
    what a hotter policy sampled; without it the step would be biased towards unlikely tokens. It does not weigh top-p:
    recorded log-probs are those before the filter, so the step is biased towards tokens that the filter keeps.

    Options:
        temperatures: one per sample, repeated. 0 is refused: a greedy sample has no distribution to correct for.
        top_ps: likewise; empty leaves `rollout.top_p`.
    """

    temperatures: list[Positive] = field(default_factory=lambda: [0.8, 1.0, 1.2, 1.4])
    top_ps: list[Share] = field(default_factory=list)
    old_logprobs: Literal["sampled", "recomputed"] = "recomputed"
    correction: str | None = "tis"

    def needs(self) -> Needs:
        ladders = {"temperature": self.temperatures, "top_p": self.top_ps}
        rungs = tuple(
            {name: float(ladder[i % len(ladder)]) for name, ladder in ladders.items() if ladder}
            for i in range(max(map(len, ladders.values())))
        )
        return replace(GRPO.needs(self), sampling=rungs)

    def check(self, group_size: int) -> None:
        GRPO.check(self, group_size)
        if self.correction is None and self.temperatures:
            raise ConfigError("algorithm.correction=null is not accepted with temperatures. Use 'tis'.")
