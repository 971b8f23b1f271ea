"""A trained reward model as a reward.

It stands among the backends, not in `rl4llm.rewards`, because it runs a model. `rl4llm.build` registers it with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl4llm.backends.heads import VALUE_HEAD_FILE
from rl4llm.backends.models import load_model, load_tokenizer, load_value_head, model_directory
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.base_env import BaseRewardFunction, SampleState
from rl4llm.core.errors import DataError, ModelError
from rl4llm.core.types import ChatMessage, Trajectory
from rl4llm.data.answers import valued_at_the_end
from rl4llm.data.demonstrations import demonstration
from rl4llm.data.pack import pack, totals_of
from rl4llm.data.render import Renderer
from rl4llm.rewards import RewardFailure


class LearnedReward(BaseRewardFunction):
    """What a reward model gives a conversation; the numbers are those that its training compared.

        rewards: [{name: reward_model, path: runs/reward_model}]

    Conversations are written by the reward model's own tokenizer and chat template, up to the last answer of the assistant.
    One that is longer than its context, or that its template cannot write, is left out as a failure, never cut.

    Args:
        path: what training with ``algorithm.name=reward_model`` exported, or the directory of its run.
        device: "auto" is cuda where there is one.
        dtype: of the weights, float32 or bfloat16.
        max_tokens_per_batch: of one pass, or the longest conversation.
    """

    score_timeout_s = None

    def __init__(
        self,
        path: str,
        name: str = "reward_model",
        device: str = "auto",
        dtype: str = "float32",
        max_tokens_per_batch: int = 8192,
    ):
        super().__init__(name)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_model(path, dtype=dtype, device=device)
        if not (Path(model_directory(path)) / VALUE_HEAD_FILE).is_file():
            raise ModelError(
                f"{path!r} has no {VALUE_HEAD_FILE}, so it is no reward model. Accepted: what a run with "
                "algorithm.name=reward_model exported."
            )
        tokenizer = load_tokenizer(path)
        self._backend = TorchBackend(model, value_head=load_value_head(path, model), lr=0.0)
        self._renderer = Renderer(tokenizer, roles=())
        self._pad_token_id = tokenizer.pad_token_id
        self._context_length = model.config.get_text_config().max_position_embeddings
        self._max_tokens_per_batch = max_tokens_per_batch

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> float:
        """The reward of one conversation; raises RewardFailure for one that cannot be read."""
        trajectory = self._read("conversation", messages, 0)
        if isinstance(trajectory, RewardFailure):
            raise trajectory
        return self._values([trajectory])[0]

    def score_batch(self, samples: Sequence[SampleState]) -> list[float | RewardFailure]:
        """Rewards in order, a failure in the place of each conversation that cannot be read."""
        found = [self._read(sample.prompt_id, sample.messages, sample.init_msg_size) for sample in samples]
        readable = [item for item in found if isinstance(item, Trajectory)]
        values = iter(self._values(readable))
        return [next(values) if isinstance(item, Trajectory) else item for item in found]

    def _read(self, prompt_id: str, messages: Sequence[ChatMessage], prompt_size: int) -> Trajectory | RewardFailure:
        try:
            whole = demonstration(self._renderer, messages, prompt_id, prompt_size=prompt_size)
        except DataError as error:
            return RewardFailure(f"the reward model's template cannot write the conversation: {error}")
        if whole.num_tokens > self._context_length:
            tokens = f"{whole.num_tokens} tokens for the reward model"
            return RewardFailure(f"the conversation has {tokens}, whose context is {self._context_length}")
        return valued_at_the_end(whole, self._renderer.stop_token_ids[0])

    def _values(self, trajectories: Sequence[Trajectory]) -> list[float]:
        values = torch.zeros(len(trajectories))
        if not trajectories:
            return []
        batches = pack(
            trajectories,
            [float(number) for number in range(len(trajectories))],  # in the place of a credit: whose token it is
            max_tokens_per_batch=max(self._max_tokens_per_batch, *(item.num_tokens for item in trajectories)),
            layout="shared",
            aggregation="token",
            totals=totals_of(trajectories),
            pad_token_id=self._pad_token_id,
        )
        for batch in batches:
            owners_N = batch.credits_BT[batch.mask_BT].long()
            values[owners_N] = self._backend.forward(batch).cpu()[batch.mask_BT]
        return values.tolist()
