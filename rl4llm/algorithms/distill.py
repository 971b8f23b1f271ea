"""On-policy distillation: the student samples, and a teacher scores each token (Agarwal et al. 2024, GKD)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from rl4llm.algorithms.grpo import GRPO
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import NonNegative
from rl4llm.core.types import Group, TrainBatch


@dataclass(slots=True)
class Distill(GRPO):
    """A token's advantage is log(teacher / student): the policy gradient of the reverse KL, one number per token.

    The student is the policy of each update, not the one that sampled. The environment's rewards are logged; with
    `reward_coef` above 0 they also train.

    Options:
        teacher_path: directory or hub name of the teacher, which must have the same tokenizer.
        reward_coef: weight of GRPO's credit, added to the teacher's advantage.
    """

    teacher_path: str | None = None
    reward_coef: NonNegative = 0.0
    aggregation: str = "token"
    kl_coef: ClassVar[float] = 0.0  # type: ignore[misc]  # the teacher is the only reference
    reference_every: ClassVar[int] = 0  # type: ignore[misc]  # and fixed
    compares: ClassVar[bool] = False
    whiten: ClassVar[bool] = False  # type: ignore[misc]  # each update makes advantages, batch by batch

    def needs(self) -> Needs:
        return replace(GRPO.needs(self), every_token=True, reference=True, reference_path=self.teacher_path)

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        # The student of this update: an older one that sampled would be compared with the teacher in its place.
        teacher_kl_BT = logprobs_BT.detach() - batch.ref_logprobs_BT
        batch.advantages_BT = (self.reward_coef * batch.credits_BT - teacher_kl_BT) * batch.mask_BT
        loss_BT, metrics = GRPO.surrogate(self, batch, logprobs_BT)
        return loss_BT, metrics | {"teacher_kl": teacher_kl_BT}

    def credits(self, group: Group) -> Tensor:
        return GRPO.credits(self, group) * (self.reward_coef > 0)

    def check(self, group_size: int) -> None:
        GRPO.check(self, group_size)
        if self.teacher_path is None:
            raise ConfigError(
                "algorithm.teacher_path is not set. Set it to the directory or hub name of the teacher."
            )
        if self.reward_coef > 0 and group_size < 2:
            raise ConfigError(
                f"rollout.group_size={group_size} is not accepted with algorithm.reward_coef. Use 2 or more."
            )
