"""From prompts to tokens to micro-batches: what one step of the loop does if everything has its maximum length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from rl4llm.backends.attention import stream_of
from rl4llm.backends.models import load_tokenizer
from rl4llm.compose.choices import in_part
from rl4llm.compose.data import (
    LONGEST,
    fitting_prompts,
    held_out_rows,
    longest_rows,
    micro_batch_plan,
    policy_openings,
    training_rows,
)
from rl4llm.compose.environments import (
    THE_POLICY,
    Provided,
    build_env,
    build_rewards,
    build_sandbox,
    with_hosts,
)
from rl4llm.compose.models import vision_of
from rl4llm.compose.setup import Setup
from rl4llm.compose.supervised import dataset_reader
from rl4llm.compose.trainer import batching_of
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import TrainBatch, Trajectory, images_of
from rl4llm.data.answers import ANSWER_COLUMNS
from rl4llm.data.plan import RolloutSize, is_computed
from rl4llm.data.render import Renderer
from rl4llm.inference.local import MAX_ROWS

LOOKED_AT = 256
"""Number of rows, spread over the dataset, for the mean length."""


@dataclass(frozen=True, slots=True)
class Counts(RolloutSize):
    """One step of the loop on each rank, at most; lengths are in tokens.

    In the largest micro-batch, `trains` tokens need a log-prob, and `keys` positions keep keys and values; those of a
    shared prompt count once per trajectory. `rows` train and `held_out` rows are only evaluated. `usual` is the mean
    length of a prompt, or of a whole conversation.
    """

    rows: int
    held_out: int
    usual: float
    updates: int  # optimizer steps per step of the loop
    micro_batches: int  # per optimizer step
    tokens: int  # in the largest micro-batch, like the next three
    padded: int
    trains: int
    keys: int
    step_tokens: int  # in all micro-batches of a rollout
    image_tokens: int  # of a prompt or conversation, at most
    seen_tokens: int  # of the images in the largest micro-batch, where each counts once


@dataclass(frozen=True, slots=True)
class AnyPrompt:
    """Stands in for tokenizer and renderer where neither they nor rows are read: each prompt has `tokens` tokens."""

    tokens: int
    pad_token_id = 0
    refuses_text = False

    def of_row(self, row: Mapping[str, Any]) -> AnyPrompt:
        return self

    def length(self, messages: Sequence[ChatMessage]) -> int:
        return self.tokens

    def prompt_too_long(self, messages: Sequence[ChatMessage], limit: int) -> int | None:
        return self.tokens if self.tokens > limit else None


ANY_ROW: Any = {"messages": [{"role": "user", "content": "?"}], "ground_truth": ""}


def count(setup: Setup, context_length: int, prompt_tokens: int | None = None) -> Counts:
    """Count from the data, the tokenizer and the configuration; no model is needed.

    With `prompt_tokens` the configuration is enough: every prompt has that length. A model of padded rows is counted in
    `training.layout`, which its run replaces by ``sorted``.
    """
    model = setup.config.model
    if prompt_tokens is None:
        setup = replace(setup, tokenizer=load_tokenizer(model.path, pad_token=model.pad_token))
    elif setup.needs.learns_from == "episodes":
        setup = replace(setup, tokenizer=AnyPrompt(prompt_tokens))
    else:
        raise ConfigError("--prompt-tokens is for runs that sample. Leave it out: a dataset is read.")
    counted = _count_episodes if setup.needs.learns_from == "episodes" else _count_rows
    return counted(setup, context_length)


def _count_episodes(setup: Setup, context_length: int) -> Counts:
    config, tokenizer = setup.config, setup.tokenizer
    with ExitStack() as opened:
        played: list[tuple[BaseMDPEnv, Any, int]] = []  # and the maximum tokens of a turn
        held_out = 0
        for name, part in config.environments.items():
            env, measured = in_part(name, _environment, replace(setup, config=part))
            opened.callback(env.close)
            renderer: Any = tokenizer if isinstance(tokenizer, AnyPrompt) else Renderer.of(env, tokenizer)
            fitted = (env, renderer, context_length, part)
            env.dataset = in_part(name, fitting_prompts, env.dataset, *fitted, "data")
            measured = in_part(name, fitting_prompts, measured, *fitted, "eval")
            played.append((env, renderer, part.rollout.max_tokens))
            held_out += len(measured)
        sampled = max(env.max_steps * turn for env, _, turn in played)
        batching = batching_of(setup, longest_completion=min(context_length, sampled))
        plan = micro_batch_plan(config, batching, played, context_length)
        largest = int(np.argmax(plan.tokens))
        sequences = plan.sequences[largest]
        image_tokens = max(_image_tokens(env) for env, _, _ in played)
        return Counts(
            rows=0 if isinstance(tokenizer, AnyPrompt) else sum(len(env.dataset) for env, _, _ in played),
            held_out=held_out,
            usual=float(
                np.mean([length for env, renderer, _ in played for length in _prompt_lengths(env, renderer)])
            ),
            prompts=plan.prompts,
            samples=plan.samples,
            roles=plan.roles,
            prompt_tokens=plan.prompt_tokens,
            new_tokens=plan.new_tokens,
            updates=plan.updates * config.training.passes_per_rollout,
            micro_batches=len(plan.tokens),
            tokens=plan.tokens[largest],
            padded=plan.tokens[largest],
            trains=sequences * plan.new_tokens,
            keys=plan.tokens[largest] + sequences * plan.prompt_tokens,
            step_tokens=sum(plan.tokens) * plan.updates,
            image_tokens=image_tokens,
            seen_tokens=-(-sequences // plan.samples) * image_tokens,
        )


def _environment(setup: Setup) -> tuple[BaseMDPEnv, Any]:
    """Return the environment of a part with unscored episodes and silent opponents, and the held-out rows."""
    setup = with_hosts(setup)
    dataset: Any
    measured: Any
    if isinstance(setup.tokenizer, AnyPrompt):
        limits = setup.config.eval
        dataset, measured = [ANY_ROW], [ANY_ROW] * (bool(limits.every) * (limits.limit or MAX_ROWS))
    else:
        dataset, measured = training_rows(setup), held_out_rows(setup) or ()
    if not len(dataset):
        raise ConfigError("The training data has no rows.")
    opponents = setup.config.env.get("opponents")
    silent = None
    if isinstance(opponents, Mapping):
        roles = (role for role, item in opponents.items() if item not in (None, THE_POLICY))
        silent = dict.fromkeys(roles, lambda messages: "")
    provided = Provided({"sandbox": lambda: build_sandbox(setup.config), "opponents": lambda: silent})
    rewards: Sequence[BaseRewardFunction] = [_Unscored("unscored")]
    combine = None
    if setup.given.hosted:  # hosts load the rewards
        rewards, combine = build_rewards(setup, provided, dataset[0])
    return build_env(setup, dataset, rewards, combine, provided), measured


class _Unscored(BaseRewardFunction):
    """Replaces the rewards, since some load models."""

    needs_ground_truth = False

    def __call__(self, messages: Any, ground_truth: Any, **columns: Any) -> float:
        return 0.0


def _prompt_lengths(env: BaseMDPEnv, renderer: Renderer) -> list[int]:
    """Return the lengths of prompts, spread over the dataset, in tokens."""
    every = max(1, len(env.dataset) // LOOKED_AT)
    rows = (env.dataset[number] for number in range(0, len(env.dataset), every))
    return [
        renderer.of_row(row).length(prompt)
        for row in islice(rows, LOOKED_AT)
        for prompt in policy_openings(env, row)
    ]


def _image_tokens(env: BaseMDPEnv) -> int:
    """Return the most tokens that the images of a prompt have."""
    if env.vision is None:
        return 0
    return max(
        sum(env.vision.count(picture) for message in prompt for picture in message.pictures)
        for row in longest_rows(env.dataset, LONGEST, vision=env.vision)
        for prompt in policy_openings(env, row)
    )


def _count_rows(setup: Setup, context_length: int) -> Counts:
    """Count a dataset: the longest rows are read as they will be trained on, and a step is made of these."""
    config, dataset = setup.config, training_rows(setup)
    held_out = held_out_rows(setup) or ()
    answers = ANSWER_COLUMNS.get(setup.needs.learns_from, ())
    read_row, fitting = dataset_reader(setup, dataset)
    dataset = fitting(dataset, context_length, "data")
    batching = batching_of(setup)
    longest = longest_rows(
        dataset,
        max(1, config.rollout.prompts // batching.updates_per_rollout),
        ("messages", *answers),
        vision_of(config),
    )
    groups = [read_row(row, str(row.get("prompt_id", number))) for number, row in enumerate(longest)]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    batches = batching.pack(trajectories, [1.0] * len(trajectories))
    largest = max(batches, key=lambda batch: batch.token_ids_BT.numel())
    every = max(1, len(dataset) // LOOKED_AT)
    some = [
        read_row(row, str(row.get("prompt_id", ""))) for row in islice(dataset, 0, LOOKED_AT * every, every)
    ]
    policy = max(trajectory.num_policy_tokens for trajectory in trajectories)
    length = max(trajectory.num_tokens for trajectory in trajectories)
    return Counts(
        rows=len(dataset),
        held_out=len(held_out),
        usual=float(np.mean([trajectory.num_tokens for group in some for trajectory in group.trajectories])),
        prompts=config.rollout.prompts,
        samples=max(len(group.trajectories) for group in groups),
        roles=1,
        prompt_tokens=length - policy,
        new_tokens=policy,
        updates=batching.updates_per_rollout * batching.passes_per_rollout,
        micro_batches=len(batches),
        tokens=int(is_computed(largest).sum()),
        padded=largest.token_ids_BT.numel(),
        trains=int(largest.mask_BT.sum()),
        keys=_keys(largest),
        step_tokens=sum(batch.token_ids_BT.numel() for batch in batches) * batching.updates_per_rollout,
        **_images(trajectories, largest),
    )


def _images(trajectories: Sequence[Trajectory], batch: TrainBatch) -> dict[str, int]:
    """Return the image tokens of the trajectory that has most of them, and those of a batch."""
    places = [images_of(trajectory.spans) for trajectory in trajectories]
    lengths = {place.image: place.length for images in places for place in images}
    return {
        "image_tokens": max(sum(place.length for place in images) for images in places),
        "seen_tokens": sum(lengths[image] for image in batch.images),
    }


def _keys(batch: TrainBatch) -> int:
    """Return the positions whose keys attention keeps; a shared prefix counts again for each segment behind it."""
    blocks = stream_of(batch).blocks
    return sum(block.count * (block.length + sum(length for _, length in block.path)) for block in blocks)
