"""Self-distillation: the policy learns from itself as a teacher that knows more (privileged context).

SDFT is Shenfeld et al. 2026 (arXiv 2601.19897), SDPO is Hübotter et al. 2026 (arXiv 2601.20802).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from rl4llm.algorithms.functional import clipped_surrogate
from rl4llm.algorithms.policy_gradient import PolicyGradient
from rl4llm.core.base_algorithm import Needs, Prompt
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.base_reward import policy_messages
from rl4llm.core.errors import ConfigError
from rl4llm.core.sample import SampleState
from rl4llm.core.schema import Fraction, Positive, Share
from rl4llm.core.types import ChatMessage, Group, TrainBatch, Trajectory

SOLUTION = "\n\nCorrect solution:\n\n"
FEEDBACK = "\n\nThe following is feedback from your unsuccessful earlier attempt:\n\n"


@dataclass(slots=True)
class SelfDistillation(PolicyGradient):
    """The teacher reads another prompt before the tokens that the policy sampled; a trajectory without one does not train.

    With log-probs z of the policy and r of the teacher, a token's loss is (z - r) z times the ratio to the sampler, and only
    the last z has a gradient: the policy gradient of the reverse KL.

    Options:
        teacher: "live" is the policy before the updates of a step, "base" the model at the start of the run, "ema" a further
            model whose weights are an exponential mean of the policy's.
        teacher_rate: how much of the way to the policy "ema" moves after each step.
        ratio_max: upper bound of the ratio.
        template: what the last user message of the prompt becomes.
    """

    teacher: Literal["live", "base", "ema"] = "live"
    teacher_rate: Share = 0.05
    ratio_max: Positive = 2.0
    template: str = ""
    aggregation: str = "token"
    distill_coef: ClassVar[float] = 1.0
    tells: ClassVar[tuple[str, ...]] = ()  # what a template may tell, one of which it must
    kl_coef: ClassVar[float] = 0.0  # type: ignore[misc]  # the teacher is the only reference
    reference_every: ClassVar[int] = 0  # type: ignore[misc]
    whiten: ClassVar[bool] = False  # type: ignore[misc]

    @property
    def compares(self) -> bool:  # type: ignore[override]
        return self.distill_coef < 1

    def needs(self) -> Needs:
        return replace(
            PolicyGradient.needs(self),
            every_token=True,
            reference=True,
            reference_live=self.teacher == "live",
            reference_every=int(self.teacher == "ema"),
            reference_rate=self.teacher_rate if self.teacher == "ema" else 1.0,
            privileged=True,
        )

    def learns_from(self, trajectory: Trajectory) -> bool:
        return PolicyGradient.learns_from(self, trajectory) and (self.compares or any(trajectory.privileged))

    def credits(self, group: Group) -> Tensor:
        return PolicyGradient.credits(self, group) * self.compares

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        # The student of this update: an older one that sampled would be compared with the teacher in its place.
        gap_BT = logprobs_BT.detach() - batch.ref_logprobs_BT
        gap_BT = gap_BT.masked_fill(gap_BT.isnan(), 0.0)  # in a record that the teacher does not read
        ratio_BT = (logprobs_BT.detach() - batch.old_logprobs_BT).exp().clamp(max=self.ratio_max)
        return gap_BT * ratio_BT * logprobs_BT, {"teacher_kl": gap_BT}

    def check(self, group_size: int) -> None:
        PolicyGradient.check(self, group_size)
        if not any(f"{{{name}}}" in self.template for name in self.tells):
            names = " or ".join(f"{{{name}}}" for name in self.tells)
            raise ConfigError(f"algorithm.template tells the teacher nothing. It must contain {names}.")


@dataclass(slots=True)
class SDFT(SelfDistillation):
    """The teacher reads a demonstration of the task; no reward trains.

    Options:
        demonstration: the dataset's column with a right answer, such as ground_truth.
    """

    demonstration: str = "demonstration"
    template: str = (
        "{prompt}\n\nThis is an example for a response to the question:\n{demonstration}\n\n"
        "Now answer with your own response, including the thinking process."
    )
    tells: ClassVar[tuple[str, ...]] = ("demonstration",)

    def needs(self) -> Needs:
        return replace(SelfDistillation.needs(self), columns=(self.demonstration,))

    def privileged_prompts(self, samples: Sequence[SampleState], group: Group) -> list[Prompt | None]:
        rows = ({**sample.columns, "ground_truth": sample.ground_truth} for sample in samples)
        texts = [{"demonstration": row[self.demonstration]} for row in rows]
        return [_told(sample, self.template, text) for sample, text in zip(samples, texts, strict=True)]


@dataclass(slots=True)
class SDPO(SelfDistillation):
    """The teacher reads the right answer of another sample, and for a wrong answer what the environment said about it.

    That is the text in ``sample.extras["feedback"]``, which an environment or a reward's `score_batch` sets.

    Options:
        solved_at: the lowest reward of a right answer.
        distill_coef: share of this loss; the rest is GRPO's with its clip, and with it all samples train.
        clip_low, clip_high: bounds of the ratio in GRPO's loss, 1 - clip_low to 1 + clip_high.
    """

    solved_at: float = 1.0
    distill_coef: Fraction = 1.0  # type: ignore[misc]
    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    template: str = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question."
    tells: ClassVar[tuple[str, ...]] = ("solution", "feedback")

    def privileged_prompts(self, samples: Sequence[SampleState], group: Group) -> list[Prompt | None]:
        solved = [i for i, trajectory in enumerate(group.trajectories) if trajectory.reward >= self.solved_at]
        prompts = []
        for i, sample in enumerate(samples):
            texts = dict.fromkeys(self.tells, "")
            if sibling := next((samples[j] for j in solved if j != i), None):
                answer = "\n\n".join(message.content for message in policy_messages(sibling))
                texts["solution"] = f"{SOLUTION}{answer}"
            if i not in solved and (feedback := sample.extras.get("feedback")):
                texts["feedback"] = f"{FEEDBACK}{feedback}"
            prompts.append(_told(sample, self.template, texts) if any(texts.values()) else None)
        return prompts

    def surrogate(self, batch: TrainBatch, logprobs_BT: Tensor) -> tuple[Tensor, TokenMetrics]:
        loss_BT, metrics = SelfDistillation.surrogate(self, batch, logprobs_BT)
        ratio_BT = (logprobs_BT - batch.old_logprobs_BT).exp()
        policy_BT = clipped_surrogate(ratio_BT, batch.advantages_BT, self.clip_low, self.clip_high)
        return self.distill_coef * loss_BT + (1 - self.distill_coef) * policy_BT, metrics


def _told(sample: SampleState, template: str, texts: Mapping[str, str]) -> Prompt | None:
    """Return the sample's prompt with its last user message, pictures included, in a template; None without one."""
    prompt = sample.messages[: sample.init_msg_size]
    place = max((i for i, message in enumerate(prompt) if message.role == "user"), default=None)
    if place is None:
        return None
    parts = prompt[place].parts or (prompt[place].content,)
    before, mark, after = template.partition("{prompt}")
    # each in one pass, so that braces in the texts stay what they are
    ends = [re.sub(r"\{(\w+)\}", lambda name: texts.get(name[1], name[0]), end) for end in (before, after)]
    message = ChatMessage.showing("user", ends[0], *(parts if mark else ()), ends[1])
    return [*prompt[:place], message, *prompt[place + 1 :]]
