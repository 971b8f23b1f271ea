"""From the configuration to a trainer that reads a dataset; a run that samples episodes does not import this."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from rl4llm.backends.models import stored_config
from rl4llm.compose.choices import warnings_of
from rl4llm.compose.data import by_size, check_texts, held_out_rows, prompt_stream, rows_to_measure
from rl4llm.compose.environments import example_of_calls, make_env, make_rewards
from rl4llm.compose.models import build_policy, build_reference, vision_of
from rl4llm.compose.setup import Setup, held
from rl4llm.compose.trainer import base_of, batching_of, tracker_of
from rl4llm.config import Config
from rl4llm.core.base_backend import models_of
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import accepted_options
from rl4llm.core.types import ChatMessage, Group
from rl4llm.data.answers import ANSWER_COLUMNS
from rl4llm.data.demonstrations import (
    Read,
    by_form,
    comparison_group,
    demonstration_group,
    label_group,
    pair_group,
)
from rl4llm.data.lengths import PATIENCE, context_limits, dropped, unfit, usable_rows
from rl4llm.data.overlap import overlap_warnings
from rl4llm.data.render import Renderer
from rl4llm.data.texts import hold_text, text_chunks, text_group
from rl4llm.envs import ENVIRONMENTS
from rl4llm.runs.run_dir import RunDir
from rl4llm.trainers.dataset import DatasetTrainer
from rl4llm.trainers.prepare import Preparation

READERS: dict[str, Callable[[Renderer, Mapping[str, Any], str], Group]] = {
    "demonstrations": demonstration_group,
    "worlds": partial(demonstration_group, learned="context"),
    "conversations": partial(demonstration_group, learned="all"),
    "pairs": pair_group,
    "comparisons": comparison_group,
    "labels": label_group,
}
"""Functions from a row of a dataset to a group, by what an algorithm learns from."""


def build_supervised(setup: Setup, dataset: Any, run: RunDir) -> DatasetTrainer:
    """Check and load what a run on `dataset` needs, and make its trainer."""
    needs, objects, tokenizer = setup.needs, setup.given, setup.tokenizer
    held_out = held_out_rows(setup) or ()
    reader, fitting = dataset_reader(setup, dataset)
    stored = objects.model.config if objects.model is not None else stored_config(setup.config.model.path)
    context_length, _ = min(context_limits(stored))
    fitted, kept_out = (
        fitting(rows, context_length, where) for rows, where in ((dataset, "data"), (held_out, "eval"))
    )
    config, note = with_steps(setup.config, len(fitted), setup.machine.ranks.size)
    setup = replace(setup, config=config)
    if note and setup.machine.ranks.is_first:
        run.keep("config.yaml", config.to_yaml(), private=True)  # with the steps
    # The copy is made before training changes the policy's weights.
    start = copy.deepcopy(objects.model) if needs.reference else None
    backend = build_policy(setup)
    if needs.value_head:
        # Others find the token that has the score by it.
        backend.model.config.pad_token_id = tokenizer.pad_token_id
        _check_last_token(reader(fitted[0], "0"), tokenizer)
    reference, ranks = build_reference(setup, backend, start), setup.machine.ranks
    held(setup, run)
    prepared = partial(
        Preparation, algorithm=setup.algorithm, policy=backend, reference=reference, ranks=ranks
    )
    batching = batching_of(setup, [backend, *models_of(reference)])
    answered = needs.learns_from not in ANSWER_COLUMNS and not hold_text(dataset)
    warnings = [
        *warnings_of(config),
        *overlap_warnings(dataset, held_out, "eval", answered=answered),
        *dropped(dataset, fitted, "data"),
        *dropped(held_out, kept_out, "eval"),
        *backend.warnings(),
    ]
    return DatasetTrainer(
        dataset=fitted,
        tokenizer=tokenizer,
        read=reader,
        prompts=prompt_stream(setup, fitted),
        preparation=prepared(batching=batching),
        held_out=kept_out,
        fitting=lambda source: fitting(rows_to_measure(setup, source), context_length, "eval"),
        measuring=prepared(batching=replace(batching, updates_per_rollout=1, passes_per_rollout=1)),
        **base_of(setup, backend, run, tracker_of(setup, run, warnings, [note])),
    )


def with_steps(config: Config, rows: int, ranks: int) -> tuple[Config, str]:
    """Return the configuration with the steps of `training.epochs` passes over the rows as max_steps, and a note of it."""
    epochs, batch = config.training.epochs, config.rollout.prompts * ranks
    if epochs is None:
        return config, ""
    steps = math.ceil(round(epochs * rows / batch, 6))
    note = f"training.epochs={epochs:g}: {rows:,} rows in batches of {batch:,} are {steps:,} steps"
    if "max_steps" in config.origin.keys and config.max_steps < steps:
        return config, f"{note}, and max_steps={config.max_steps:,} ends the run earlier"
    return replace(config, max_steps=steps), note


Fitting = Callable[[Any, int, str], Any]
"""(rows, tokens of the context, "data" or "eval") -> the rows that are trained on or measured."""


def dataset_reader(setup: Setup, dataset: Any) -> tuple[Read, Fitting]:
    """Return the function that reads a row of a dataset, and the one that checks and selects rows, or cuts texts."""
    if hold_text(dataset):
        return text_group, partial(_chunks, setup)
    learns_from = setup.needs.learns_from
    answers = ANSWER_COLUMNS.get(learns_from, ())
    renderer = dataset_renderer(setup, dataset, answers)
    reader = partial(READERS[learns_from], renderer)

    def fitting(rows: Any, context_length: int, where: str) -> Any:
        check_texts(rows, partial(_texts, ("messages", *answers)), renderer, where)
        return fitting_conversations(rows, reader, setup, context_length)

    return reader, fitting


def _chunks(setup: Setup, rows: Any, context_length: int, where: str) -> Any:
    """Return the texts of rows, cut to the context."""
    size = min(context_length, setup.config.training.max_tokens_per_batch or context_length)
    return text_chunks(rows, setup.tokenizer, setup.config.data.special_tokens, size)


def _check_last_token(group: Group, tokenizer: Any) -> None:
    """Raise ConfigError if conversations end with the pad token, which classifiers of transformers skip."""
    token = group.trajectories[0].spans[-2].token_ids[-1]
    if token == tokenizer.pad_token_id:
        raise ConfigError(
            f"Conversations end with the pad token {token!r}, which classifiers of transformers skip. Set model.pad_token "
            "to another special token."
        )


def _texts(columns: Sequence[str], row: Mapping[str, Any]) -> list[list[ChatMessage]]:
    return [[ChatMessage.from_dict(message) for message in row[column]] for column in columns]


def dataset_renderer(setup: Setup, dataset: Any, answers: Sequence[str]) -> Renderer:
    """Return a renderer for the conversations of a dataset, with answers in these columns or by default in `messages`."""
    config, tokenizer, columns = setup.config, setup.tokenizer, answers or ("messages",)
    roles = {message["role"] for row in dataset for column in columns for message in row[column]}
    between = tuple(sorted(roles - {"assistant", "system"}))
    schemas, call_example = _shown_tools(setup, dataset)
    if not schemas:
        call_example = example_of_calls(dataset, tokenizer, config.env.get("template_args"))
    return Renderer(
        tokenizer,
        schemas,
        roles=between,
        template_args=config.env.get("template_args"),
        special_tokens=config.data.special_tokens,
        call_example=call_example,
        vision=vision_of(config),
    )


def _shown_tools(setup: Setup, dataset: Any) -> tuple[Any, str]:
    """Return what prompts of the environment show of its tools: their schemas, and an example of a call."""
    config, env_class = setup.config, ENVIRONMENTS[setup.config.env["name"]]
    if "tools" not in accepted_options(env_class):
        return None, ""
    row = {"messages": dataset[0]["messages"], "ground_truth": None}
    fixed = {
        "dataset": [row],
        "tokenizer": setup.tokenizer,
        "reward_functions": make_rewards(["tool_use"], {}),
    }
    # No tool runs, and nothing is scored.
    with closing(make_env(env_class, config.env, {"sandbox": None}, **fixed)) as env:
        return env.tool_schemas, env.call_example if env.tool_schemas else ""


def fitting_conversations(rows: Any, read: Read, setup: Setup, context_length: int) -> Any:
    """Return the rows of a dataset that the template can render and that fit the context.

    Raises DataError for the first other row, with its place, unless data.bad_rows=skip. A row of each form is read, and all
    rows of a form whose first one is refused. Then the longest texts are read, until `PATIENCE` rows in a row fit.
    """
    skip = setup.config.data.bad_rows == "skip"
    columns = ("messages", *ANSWER_COLUMNS.get(setup.needs.learns_from, ()))

    def length(number: int) -> int:
        group = read(rows[number], str(rows[number].get("prompt_id", number)))
        return max(trajectory.num_tokens for trajectory in group.trajectories)

    faults: dict[int, str] = {}
    longest = by_size(rows, columns, vision_of(setup.config))
    for numbers, patience in (*((numbers, 1) for numbers in by_form(rows, columns)), (longest, PATIENCE)):
        if skip or not faults:
            faults |= unfit(numbers, length, context_length, skip=skip, patience=patience)
    return usable_rows(rows, faults, skip=skip)
