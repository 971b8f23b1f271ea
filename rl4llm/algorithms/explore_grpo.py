"""GRPO that explores: the samples of a prompt are drawn at different temperatures and top-p."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from rl4llm.algorithms.grpo import GRPO
from rl4llm.algorithms.registry import register_algorithm
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.errors import ConfigError


@register_algorithm("explore_grpo")
@dataclass(slots=True)
class ExploreGRPO(GRPO):
    """Sample i of a prompt is drawn at the i-th temperature and top-p of the ladders, which begin anew after the last.

    The policy that learns is still the one at `rollout.temperature`. What a hotter policy sampled is weighed by truncated
    importance sampling (`correction`), without which the step would be biased towards the unlikely.

    Options:
        temperatures: one per sample, repeated; a greedy sample (0) has no distribution to correct for and is refused.
        top_ps: likewise; empty leaves `rollout.top_p`.
    """

    temperatures: list[float] = field(default_factory=lambda: [0.8, 1.0, 1.2, 1.4])
    top_ps: list[float] = field(default_factory=list)
    old_logprobs: Literal["sampled", "recomputed"] = "recomputed"
    correction: str | None = "tis"

    def needs(self) -> Needs:
        count = max(len(self.temperatures), len(self.top_ps))
        ladder = tuple({**self._rung("temperature", i), **self._rung("top_p", i)} for i in range(count))
        return replace(GRPO.needs(self), sampling=ladder)

    def check(self, group_size: int) -> None:
        GRPO.check(self, group_size)
        if not self.temperatures and not self.top_ps:
            raise ConfigError("algorithm.temperatures and algorithm.top_ps are both empty. Give one, or use grpo.")
        if not all(temperature > 0 for temperature in self.temperatures):
            raise ConfigError(f"algorithm.temperatures={self.temperatures} is not accepted: all above 0.")
        if not all(0 < top_p <= 1 for top_p in self.top_ps):
            raise ConfigError(f"algorithm.top_ps={self.top_ps} is not accepted: all above 0, at most 1.")
        if self.correction is None:
            raise ConfigError("algorithm.correction=null is not accepted with ladders of temperatures. Use 'tis'.")

    def _rung(self, name: str, index: int) -> dict[str, float]:
        ladder = {"temperature": self.temperatures, "top_p": self.top_ps}[name]
        return {name: float(ladder[index % len(ladder)])} if ladder else {}
