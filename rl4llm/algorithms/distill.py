"""On-policy distillation: the student samples, and a teacher scores each token (Agarwal et al. 2024, GKD)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from rl4llm.algorithms.divergence import DivergenceKind, divergence, with_tail
from rl4llm.algorithms.grpo import GRPO
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.base_backend import Divergence, TokenMetrics
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import Natural, NonNegative, Range
from rl4llm.core.types import Group, TrainBatch


@dataclass(slots=True)
class Distill(GRPO):
    """The student learns to say what its teacher would, at each token that it sampled.

    With `divergence` "sampled" a token's advantage is log(teacher / student): the policy gradient of the reverse KL, one
    number per token. With another one the loss of a token is that divergence between the distributions of teacher and
    student there, so that samples of older weights need no ratio.

    The student is the policy of each update, not the one that sampled. The environment's rewards are logged; with
    `reward_coef` above 0 they also train.

    Options:
        teacher_path: directory or hub name of the teacher, which must have the same tokenizer.
        teacher_url: address of a server with the teacher, in place of its path: vLLM, SGLang or the embedded engine.
        teachers: path or address of the teacher of each of `parts`, by name; those without one have the teacher above.
        divergence: "sampled"; "forward" KL(teacher || student), "reverse" KL(student || teacher), or "jensen_shannon", see
            `rl4llm.algorithms.divergence.divergence`.
        top_k: the teacher's most probable tokens that are compared, all others together as one more; 0 compares the whole
            vocabulary.
        alpha: the teacher's share in the mixture of "jensen_shannon".
        reward_coef: weight of GRPO's credit, added to the teacher's advantage.
    """

    teacher_path: str | None = None
    teacher_url: str | None = None
    teachers: dict[str, str] = field(default_factory=dict)
    divergence: Literal["sampled"] | DivergenceKind = "sampled"
    top_k: Natural = 0
    alpha: Annotated[float, Range(0.01, 0.99)] = 0.5
    reward_coef: NonNegative = 0.0
    aggregation: str = "token"
    kl_coef: ClassVar[float] = 0.0  # type: ignore[misc]  # the teacher is the only reference
    reference_every: ClassVar[int] = 0  # type: ignore[misc]  # and fixed
    compares: ClassVar[bool] = False
    whiten: ClassVar[bool] = False  # type: ignore[misc]  # each update makes advantages, batch by batch

    def needs(self) -> Needs:
        needs = replace(GRPO.needs(self), every_token=True, reference=True, reference_path=self.teacher_path)
        needs = replace(needs, reference_url=self.teacher_url, references=self.teachers)
        if self.divergence == "sampled":
            return needs
        formula = partial(compared, self.divergence, self.alpha, self.top_k)
        return replace(needs, divergence=Divergence(formula, self.top_k))

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        # The student of this update: an older one that sampled would be compared with the teacher in its place.
        teacher_kl_BT = logprobs_BT.detach() - batch.ref_logprobs_BT
        whole = self.divergence != "sampled"
        advantages_BT = self.reward_coef * batch.credits_BT - (0 if whole else teacher_kl_BT)
        batch.advantages_BT = advantages_BT * batch.mask_BT
        loss_BT, metrics = GRPO.surrogate(self, batch, logprobs_BT)
        metrics["teacher_kl"] = teacher_kl_BT
        if whole:
            metrics["teacher_divergence"] = batch.ref_divergence_BT
            loss_BT = loss_BT + batch.ref_divergence_BT
        if whole and self.top_k:
            metrics["teacher_mass"] = batch.later["ref_top_logprobs_BTK"].exp().sum(-1)
        return loss_BT, metrics

    def credits(self, group: Group) -> Tensor:
        return GRPO.credits(self, group) * (self.reward_coef > 0)

    def check(self, group_size: int) -> None:
        GRPO.check(self, group_size)
        places = sum(place is not None for place in (self.teacher_path, self.teacher_url))
        if places > 1 or not (places or self.teachers):
            raise ConfigError(
                "Set either algorithm.teacher_path, the directory or hub name of the teacher, or algorithm.teacher_url."
            )
        if self.divergence != "sampled" and not self.top_k and (self.teacher_url or self.teachers):
            raise ConfigError("algorithm.top_k=0 needs one teacher, in the process. Set algorithm.top_k.")
        if self.divergence == "sampled" and (self.top_k or self.alpha != 0.5):
            raise ConfigError(
                "algorithm.top_k and algorithm.alpha have no effect with divergence=sampled. Set algorithm.divergence."
            )
        if self.reward_coef > 0 and group_size < 2:
            raise ConfigError(
                f"rollout.group_size={group_size} is not accepted with algorithm.reward_coef. Use 2 or more."
            )


def compared(kind: DivergenceKind, alpha: float, top: int, policy_NK: Tensor, teacher_NK: Tensor) -> Tensor:
    """Return the divergence (N,) of log-probs (N, K), of the whole vocabulary or of the `top` tokens and the rest."""
    if top:
        policy_NK, teacher_NK = with_tail(policy_NK), with_tail(teacher_NK)
    return divergence(policy_NK, teacher_NK, kind, alpha)
