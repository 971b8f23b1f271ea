"""From the configuration to rows, the order they are played in, and how one becomes a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rl4llm.build.environments import make_prompts
from rl4llm.build.models import all_ranks
from rl4llm.build.options import Given
from rl4llm.config import Config, by_part
from rl4llm.core.base_algorithm import LearnsFrom, Needs
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.seeds import derive_seed
from rl4llm.core.types import ChatMessage, Group
from rl4llm.data.answers import label_group, pair_group, valued_at_the_end
from rl4llm.data.arithmetic import arithmetic_rows
from rl4llm.data.demonstrations import Read, demonstration_group
from rl4llm.data.load import load_rows
from rl4llm.data.mixture import MixedPrompts
from rl4llm.data.pack import BatchPlan, plan_batches
from rl4llm.data.prompts import PromptStream
from rl4llm.data.read import has_splits
from rl4llm.data.render import Renderer
from rl4llm.envs import ENVIRONMENTS
from rl4llm.trainers.prepare import Batching

GENERATED: dict[str, Callable[..., list[dict[str, Any]]]] = {"arithmetic": arithmetic_rows}
"""Tasks that `data.path` may name instead of a file."""


READERS: dict[str, Callable[[Renderer, Mapping[str, Any], str], Group]] = {
    "demonstrations": demonstration_group,
    "worlds": partial(demonstration_group, learned="context"),
    "conversations": partial(demonstration_group, learned="all"),
    "pairs": pair_group,
    "labels": label_group,
}
"""How a row of a dataset becomes a group, by what an algorithm learns from."""


LOOKED_AT = 256
"""Of so many of the longest rows of a dataset it is checked before a run that they can be learned from."""


def training_rows(config: Config, given: Given, learns_from: LearnsFrom) -> Any:
    """What is learned from: the rows given, those of `data.path`, or those that the environment brings."""
    data = config.data
    source = data.path if given.dataset is None else given.dataset
    return _load(config, given, source, data.split, data.limit, learns_from)


def held_out_rows(config: Config, given: Given, learns_from: LearnsFrom = "episodes") -> Any:
    """What is only measured; None where nothing is to be."""
    if config.eval.every == 0:
        return None
    if given.eval_dataset is not None:
        source = given.eval_dataset
    elif given.dataset is not None and config.eval.path is None:
        return None
    else:
        source = config.eval.path or config.data.path
    stored = isinstance(source, str) and source not in GENERATED
    if config.eval.path is None and source == config.data.path and stored and not has_splits(source):
        raise ConfigError(
            f"eval: data.path={source!r} is one file without splits, so the held-out set would be the training set. "
            "Set eval.path to other prompts, or eval.every=0 to measure none."
        )
    return _load(config, given, source, config.eval.split, config.eval.limit, learns_from)


def environment_of(config: Config, given: Given) -> type[BaseMDPEnv]:
    """The class of the environment: the one given, or that of `env.name`; what stands for it where hosts run it."""
    return given.hosted or given.env_class or ENVIRONMENTS[config.env["name"]]


def _generator(config: Config, given: Given, source: Any) -> Callable[..., Any] | None:
    """What makes prompts that no file holds: the environment, which then takes no others, or a generated task."""
    bring = environment_of(config, given).prompts
    if bring is not None and source is None:
        return partial(make_prompts, environment_of(config, given), config.env)
    if bring is not None:
        raise ConfigError(
            f"{source!r:.100} is not accepted as data with the environment {environment_of(config, given).__name__}, which "
            "brings its own prompts. Leave data.path and eval.path out."
        )
    if source is None:
        raise ConfigError("data.path is not set. Set it in the YAML file or on the command line: data.path=...")
    return GENERATED.get(source) if isinstance(source, str) else None


def _load(
    config: Config, given: Given, source: Any, split: str, limit: int | None, learns_from: LearnsFrom = "episodes"
) -> Any:
    generate = _generator(config, given, source)
    if generate is not None:
        if learns_from != "episodes":
            where = "What the environment brings" if source is None else f"data.path={source!r}"
            raise ConfigError(
                f"{where} is a generated task for episodes, but algorithm.name={config.algorithm['name']!r} "
                f"learns from {learns_from}. Give it a dataset of those."
            )
        return generate(split, limit)
    data = config.data
    return load_rows(
        source,
        split=split,
        learns_from=learns_from,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        answer_pattern=data.answer_pattern,
        system_prompt=data.system_prompt,
        prompt_template=data.prompt_template,
        limit=limit,
    )


def prompt_stream(config: Config, dataset: Any) -> PromptStream:
    """The order in which this process plays its share of the prompts."""
    ranks = all_ranks(config)
    return PromptStream(
        len(dataset),
        config.rollout.prompts,
        rank=ranks.rank,
        world_size=ranks.size,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )


def mixed_prompts(config: Config, datasets: Mapping[str, Any]) -> MixedPrompts:
    """The order in which this process plays its share of the prompts of several environments."""
    ranks, parts = all_ranks(config), by_part(config)
    streams = {
        name: PromptStream(
            len(dataset), 1, seed=derive_seed(config.seed, "part", name), shuffle=parts[name].data.shuffle
        )
        for name, dataset in datasets.items()
    }
    return MixedPrompts(
        streams,
        {name: config.parts[name].get("weight", 1.0) for name in streams},
        batch_size=config.rollout.prompts,
        rank=ranks.rank,
        world_size=ranks.size,
        curriculum=config.curriculum,
    )


def row_reader(needs: Needs, renderer: Renderer) -> Read:
    """How rows are read: as tokens with log-probs, or for a model that gives values with one value at the end."""
    read = partial(READERS[needs.learns_from], renderer)
    if not needs.value_head:
        return read

    def read_valued(row: Mapping[str, Any], name: str) -> Group:
        group = read(row, name)
        return replace(
            group, trajectories=tuple(valued_at_the_end(t, renderer.stop_token_ids[0]) for t in group.trajectories)
        )

    return read_valued


def roles_between(dataset: Any, answers: Sequence[str]) -> tuple[str, ...]:
    """Who speaks between two answers of a dataset: in these columns, or where there are none in its messages."""
    columns = answers or ("messages",)
    roles = {message["role"] for row in dataset for column in columns for message in row[column]}
    return tuple(sorted(roles - {"assistant", "system"}))


def check_prompts(rows: Any, env: BaseMDPEnv, renderer: Renderer, context_length: int, where: str) -> None:
    """A prompt that leaves no room for an answer is found now, not in the middle of a run."""
    for number in range(len(rows)):
        openings = _policy_openings(env, rows[number])
        length = next(filter(None, (renderer.prompt_too_long(item, context_length - 1) for item in openings)), None)
        if length is not None:
            raise DataError(
                f"{where}: prompt {rows[number].get('prompt_id', number)!r} has {length} tokens, but the model's context "
                f"holds {context_length}, and an answer must fit too. Remove or shorten it."
            )


def micro_batch_plan(
    config: Config, batching: Batching, played: Sequence[tuple[BaseMDPEnv, Renderer, int]], context_length: int
) -> BatchPlan:
    """How prompts x samples become micro-batches, all of them of the environment with the longest episodes.

    `played` are environments, each with its renderer and the tokens of a turn. Raises ConfigError when they cannot.
    """
    longest, new_tokens = max((_longest(*each, context_length) for each in played), key=sum)
    return plan_batches(
        prompts=config.rollout.prompts,
        samples=config.rollout.group_size,
        max_prompt_tokens=longest,
        max_new_tokens=new_tokens,
        max_tokens_per_batch=batching.max_tokens_per_batch or batching.budget([longest + new_tokens]),
        layout=config.training.layout,
        updates=config.training.updates_per_rollout,
        roles=max(len(env.trained_roles) for env, _, _ in played),
    )


def _longest(env: BaseMDPEnv, renderer: Renderer, turn_tokens: int, context_length: int) -> tuple[int, int]:
    """The tokens of the longest prompt, and of what may follow it."""
    openings = (messages for row in longest_rows(env.dataset, 16) for messages in _policy_openings(env, row))
    longest = max(len(renderer.first(messages)) for messages in openings)
    lines = env.max_steps * len(env.roles)  # each role reads what the others say
    return longest, min(lines * turn_tokens, context_length - longest)


def _policy_openings(env: BaseMDPEnv, row: Mapping[str, Any]) -> list[list[ChatMessage]]:
    """The prompts that the policy gets from a row, one for each role that it plays."""
    openings = env.openings(row)
    return [openings[role] for role in env.policy_roles]


def _messages(row: Mapping[str, Any], column: str = "messages") -> list[ChatMessage]:
    return [item if isinstance(item, ChatMessage) else ChatMessage.from_dict(item) for item in row[column]]


def longest_rows(rows: Any, count: int, columns: Sequence[str] = ("messages",)) -> list[Mapping[str, Any]]:
    """The rows with the most text in some columns of messages."""

    def size(number: int) -> int:
        return sum(len(item.content) for column in columns for item in _messages(rows[number], column))

    return [rows[number] for number in sorted(range(len(rows)), key=size, reverse=True)[:count]]
