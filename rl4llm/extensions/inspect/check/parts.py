"""Checks of what a user provides: data, rewards, sandbox, chat template, environment. None of them needs the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rl4llm.backends.models import load_tokenizer
from rl4llm.compose.choices import in_part
from rl4llm.compose.data import held_out_rows, training_rows
from rl4llm.compose.environments import build_env, build_rewards, with_hosts
from rl4llm.compose.supervised import dataset_renderer
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import DataError
from rl4llm.data.answers import ANSWER_COLUMNS
from rl4llm.data.render import Renderer
from rl4llm.extensions.inspect.check.bench import Bench, NotNeeded, Part
from rl4llm.extensions.inspect.check.machine import check_remote
from rl4llm.rewards import check_examples
from rl4llm.testing import check_env


def data(bench: Bench) -> str:
    """Check that the rows can be read, both training and held-out ones."""
    for name, config in bench.scratch.environments.items():
        in_part(name, check_remote, config)
        setup = in_part(name, with_hosts, replace(bench.setup, config=config))
        part = Part(name, setup, in_part(name, training_rows, setup))
        if not len(part.dataset):
            raise DataError(
                f"{part.where}data.path={config.data.path!r} has no rows in {config.data.split!r}."
            )
        part.held_out = in_part(name, held_out_rows, setup)
        bench.parts.append(part)
    return "rows: " + "; ".join(
        f"{part.where}{len(part.dataset):,} to train on, {len(part.held_out or ()):,} held out"
        for part in bench.parts
    )


def tokenizer(bench: Bench) -> str:
    """Check that the tokenizer loads and has a pad token."""
    bench.tokenizer = load_tokenizer(bench.config.model.path, pad_token=bench.config.model.pad_token)
    return f"{len(bench.tokenizer):,} tokens, padded with {bench.tokenizer.pad_token!r}"


def rewards(bench: Bench) -> str:
    """Check that every reward gives its examples the scores they state."""
    for part in bench.parts:
        part.setup = replace(part.setup, tokenizer=bench.tokenizer)
        built = part.setup, bench.provided(part), part.dataset[0]
        part.rewards, part.transform = in_part(part.name, build_rewards, *built)
        in_part(part.name, check_examples, part.rewards)
    counts = {reward.name: _examples(reward) for part in bench.parts for reward in part.rewards}
    return f"{sum(counts.values())} examples pass: " + ", ".join(
        f"{name} {count}" for name, count in counts.items()
    )


def _examples(reward: BaseRewardFunction) -> int:
    return len(list(reward.examples())) + sum(_examples(part) for part in reward.parts)


def environment(bench: Bench) -> str:
    """Check that the environment keeps its contract, without a model; see `rl4llm.testing.check_env`."""
    for part in bench.parts:
        arguments = part.dataset, part.rewards, part.transform, bench.provided(part)
        part.env = in_part(part.name, build_env, part.setup, *arguments)
        in_part(part.name, check_env, part.env)
    names = [f"{part.where}{type(part.env).__name__}" for part in bench.parts]
    return f"{', '.join(names)} keeps its contract for any reply of the policy"


def template(bench: Bench) -> str:
    """Check that the chat template only appends: the policy's turns are never rendered again."""
    if not bench.samples:
        columns = ANSWER_COLUMNS.get(bench.algorithm.needs().learns_from, ())
        (part,) = bench.parts
        setup = replace(part.setup, tokenizer=bench.tokenizer)
        part.renderer = dataset_renderer(setup, part.dataset, columns)
        return _template_text(part.renderer, bench)
    for part in bench.parts:
        part.renderer = in_part(part.name, Renderer.of, part.env, bench.tokenizer)
    return _template_text(bench.parts[0].renderer, bench)


def _template_text(renderer: Any, bench: Bench) -> str:
    ends = bench.tokenizer.convert_ids_to_tokens(list(renderer.stop_token_ids))
    text = (
        f"sample conversations were extended token for token; a turn ends with {', '.join(map(repr, ends))}"
    )
    # Datasets have no env.thoughts.
    return "; ".join(
        [text, *(note for note in renderer.notes if bench.samples or "env.thoughts" not in note)]
    )


def sandbox(bench: Bench) -> str:
    """Check that the policy's programs cannot reach the machine, if the run executes any."""
    if "sandbox" not in bench.shared.made:
        raise NotNeeded("no reward, tool or environment of this run executes programs")
    return str(bench.shared["sandbox"].probe())
