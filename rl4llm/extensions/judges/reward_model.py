"""A trained reward model as a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl4llm.backends.classifier import load_value_head, stored_score
from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.base_env import SampleState
from rl4llm.core.base_reward import BaseBatchReward
from rl4llm.core.errors import DataError, ModelError, TemplateError
from rl4llm.core.types import ChatMessage, Trajectory
from rl4llm.data.demonstrations import demonstration, valued_at_the_end
from rl4llm.data.lengths import context_limits
from rl4llm.data.pack import Batching
from rl4llm.data.render import Renderer
from rl4llm.rewards import RewardFailure


class LearnedReward(BaseBatchReward):
    """The value that a trained reward model gives a conversation, which is the number that its training compared.

        rewards: [{name: reward_model, path: runs/reward_model}]

    The reward model's tokenizer and chat template render conversations up to the last answer of the assistant. If its
    training set `env.template_args` or `data.special_tokens`, set the same here. A conversation that is longer than its
    context, or that its template cannot render, is a failure and is never cut.

    Args:
        path: a ...ForSequenceClassification with one label, or the directory of a run with ``algorithm.name=reward_model``.
        device: "auto" is a GPU if one is available.
        dtype: of the weights, float32 or bfloat16.
        max_tokens_per_batch: of one pass, or the longest conversation.
        template_args: variables of the reward model's chat template, as `env.template_args` of its training.
        special_tokens: what special tokens in messages become, as `data.special_tokens` of its training.
    """

    needs_ground_truth = False
    score_timeout_s = None

    def __init__(
        self,
        path: str,
        name: str = "reward_model",
        device: str = "auto",
        dtype: str = "float32",
        max_tokens_per_batch: int = 8192,
        template_args: Mapping[str, Any] | None = None,
        special_tokens: str = "escape",
    ):
        super().__init__(name)
        try:
            model, tokenizer = load_model(path, dtype, device, values=True), load_tokenizer(path)
        except ModelError as error:
            raise ModelError(str(error).replace("model.path=", f"rewards.{name}.path=")) from error
        if stored_score(path) is None:
            accepted = "a ...ForSequenceClassification with one label"
            raise ModelError(f"{path!r} is not a reward model. Accepted: {accepted}.")
        self._backend = TorchBackend(model, value_head=load_value_head(path, model), lr=0.0)
        self._renderer = Renderer(
            tokenizer, roles=(), template_args=template_args, special_tokens=special_tokens
        )
        self._pad_token_id = tokenizer.pad_token_id
        self._context_length, _ = min(context_limits(model.config))
        self._max_tokens_per_batch = max_tokens_per_batch

    def score_batch(self, samples: Sequence[SampleState]) -> list[float | RewardFailure]:
        """Return rewards in order, with a failure for each conversation that cannot be read."""
        rendered = [
            self._read(sample.prompt_id, sample.messages, sample.init_msg_size, sample.columns)
            for sample in samples
        ]
        values = iter(self._values([item for item in rendered if isinstance(item, Trajectory)]))
        return [next(values) if isinstance(item, Trajectory) else item for item in rendered]

    def _read(
        self, prompt_id: str, messages: Sequence[ChatMessage], prompt_size: int, row: Mapping[str, Any]
    ) -> Trajectory | RewardFailure:
        try:
            renderer = self._renderer.of_row(row)
            whole = demonstration(renderer, messages, prompt_id, prompt_size=prompt_size)
        except (DataError, TemplateError) as error:
            return RewardFailure(f"the reward model's template cannot render the conversation: {error}")
        if whole.num_tokens > self._context_length:
            tokens = f"{whole.num_tokens} tokens for the reward model"
            return RewardFailure(f"the conversation has {tokens}, whose context is {self._context_length}")
        return valued_at_the_end(whole, self._renderer)

    def _values(self, trajectories: Sequence[Trajectory]) -> list[float]:
        values = torch.zeros(len(trajectories))
        if not trajectories:
            return []
        owners = [float(number) for number in range(len(trajectories))]  # in the place of credits
        batching = Batching(
            layout=self._backend.layout("shared"),
            pad_token_id=self._pad_token_id,
            max_tokens_per_batch=self._max_tokens_per_batch,
        )
        batches = batching.pack(trajectories, owners)
        for batch in batches:
            owners_N = batch.credits_BT[batch.mask_BT].long()
            values[owners_N] = self._backend.forward(batch).cpu()[batch.mask_BT]
        return values.tolist()
