"""What users write against rl4llm, as strict as mypy gets: `tests/test_types.py` has it checked, nothing runs it.

Where the wrong use of something stands, its error is ignored by name: mypy complains if there is none.
"""
# mypy: warn-return-any, disallow-untyped-calls, disallow-subclassing-any

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, assert_type

import torch
from torch import Tensor

from rl4llm import (
    BaseMDPEnv,
    BaseRewardFunction,
    ChatMessage,
    EnvState,
    GRPOTrainer,
    RolesEnv,
    SampleState,
    SamplingParams,
    register_algorithm,
    register_reward,
    tool,
)
from rl4llm.config import Config, load_config
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.core.base_backend import TokenMetrics
from rl4llm.core.base_env import LLM, EpisodeState
from rl4llm.core.types import Completion, Group, TrainBatch


@register_reward("typed_user")
class Exact(BaseRewardFunction):
    def __init__(self, name: str = "exact", *, points: float = 1.0, **kwargs: Any):
        super().__init__(name)
        self.points = points

    def __call__(self, messages: list[ChatMessage], ground_truth: str, **kwargs: Any) -> float:
        return self.points * (messages[-1].content.strip() == ground_truth)


class Awaited(BaseRewardFunction):
    async def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> float:
        return float(len(messages))


@register_reward
class PerTurn(BaseRewardFunction):
    per_turn = True

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> list[float]:
        return [0.0 for message in messages if message.role == "assistant"]

    def score_batch(self, samples: Sequence[SampleState]) -> list[list[float]]:
        return [self(sample.messages, sample.ground_truth) for sample in samples]


class Words(BaseRewardFunction):
    def __call__(self, messages: list[ChatMessage], ground_truth: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return messages[-1].content


class Guess(BaseMDPEnv):
    def respond(self, sample: SampleState) -> list[ChatMessage]:
        assert_type(sample.last_message, ChatMessage)
        assert_type(sample.stop_reason, str | None)
        return [] if sample.last_message.content == sample.ground_truth else [ChatMessage("user", "No.")]


class GuessSlowly(BaseMDPEnv):
    async def respond(self, sample: SampleState) -> list[ChatMessage]:
        completion = await self.off_loop(lambda: sample.last_message.content)
        return [ChatMessage("user", completion)]


class Loop(BaseMDPEnv):
    @torch.inference_mode()
    def _run_interaction_loop(
        self, env_state: EnvState, llm: LLM, sampling_params: SamplingParams, **kwargs: Any
    ) -> EnvState:
        replies = llm.generate(
            env_state.sample_states, sampling_params.replace(max_tokens=llm.context_length // 2)
        )
        assert_type(replies, list[Completion])
        for sample, reply in zip(env_state.sample_states, replies, strict=True):
            sample.finish("done" if reply.finish_reason == "stop" else "length")
        return env_state


class Riddle(RolesEnv):
    roles = ("guesser", "answerer", "judge")
    opponents = MappingProxyType({"answerer": "package.module:answer"})

    def next_role(self, episode: EpisodeState) -> str | None:
        return None if len(episode.said) == 4 else self.roles[len(episode.said) % 2]


@register_algorithm("typed_user")
@dataclass(slots=True)
class Reinforce(BaseAlgorithm):
    entropy_coef: float = 0.0
    aggregation: str = "token"

    def needs(self) -> Needs:
        return Needs(entropy=self.entropy_coef > 0, reference=True)

    def credits(self, group: Group) -> Tensor:
        assert_type(group.rewards_G, Tensor)
        return group.rewards_G - group.rewards_G.mean()

    def token_losses(
        self, batch: TrainBatch, logprobs_BT: Tensor, entropy_BT: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        loss_BT = -batch.advantages_BT * logprobs_BT
        drift_BT = assert_type(logprobs_BT - batch.ref_logprobs_BT, Tensor)
        if entropy_BT is not None:
            loss_BT = loss_BT - self.entropy_coef * entropy_BT
        return loss_BT, {"drift": drift_BT}


@tool
def weather(city: str, days: int = 1) -> str:
    """The weather forecast."""
    return f"{city} in {days} days: rain"


def combined(rewards: dict[str, Tensor]) -> Tensor:
    return rewards["exact"] + 0.1 * rewards["brief"]


def brief(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) < 80) for text in completions]


def train() -> None:
    rows = [{"messages": [{"role": "user", "content": "1+1?"}], "ground_truth": "2"}]
    trainer = GRPOTrainer(
        "a/model", rows, [Exact(), brief], reward_transform_fn=combined, env=Guess, max_steps=3
    )
    assert_type(trainer.train(), GRPOTrainer)
    assert_type(trainer.config, Config)
    assert_type(trainer.trainer.step, int)
    assert_type(load_config(None, {"max_steps": 2}).rollout.group_size, int)
    assert_type(weather("Bern"), str)
    GRPOTrainer("a/model", env=Exact)  # type: ignore[arg-type]
    SamplingParams(temperature="hot")  # type: ignore[arg-type]
    ChatMessage("user")  # type: ignore[call-arg]
    weather(3)  # type: ignore[arg-type]
