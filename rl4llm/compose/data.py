"""From the configuration to rows, their order, and the micro-batches that they become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from rl4llm.compose.environments import make_prompts
from rl4llm.compose.setup import Setup
from rl4llm.config import Config
from rl4llm.core.base_algorithm import LearnsFrom
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import ConfigError, SpecialTokenError
from rl4llm.core.registry import load
from rl4llm.core.tables import GENERATED
from rl4llm.core.types import ChatMessage
from rl4llm.data.lengths import dropped, place, unfit, usable_rows
from rl4llm.data.load import load_rows
from rl4llm.data.pack import Batching
from rl4llm.data.plan import BatchPlan, plan_batches
from rl4llm.data.prompts import PromptStream
from rl4llm.data.read import has_splits
from rl4llm.data.render import Renderer
from rl4llm.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from rl4llm.data.mixture import MixedPrompts
    from rl4llm.data.vision import Vision


LEAST = 0.1
"""The least share of its weight that a pool of a dataset keeps in a curriculum."""

LONGEST = 16
"""Rows that are measured to find the longest."""

CHARACTERS = 4
"""Of a token, about, to compare texts and images."""


def training_rows(setup: Setup) -> Any:
    """Load the training rows: those given, those of `data.path`, or those of the environment."""
    data = setup.config.data
    source = (data.path or None) if setup.given.dataset is None else setup.given.dataset
    rows = _load(setup, source, data.split, data.limit)
    if setup.needs.learns_from == "labels":
        load("rl4llm.data.answers:check_labels")(rows, data.limit)
    return rows


def held_out_rows(setup: Setup) -> Any:
    """Load the rows for evaluation; return None if nothing is to be evaluated."""
    config, objects = setup.config, setup.given
    if config.eval.every == 0:
        return None
    if objects.eval_dataset is not None:
        source = objects.eval_dataset
    elif objects.dataset is not None and not config.eval.path:
        return None
    else:
        source = config.eval.path or config.data.path
    stored = isinstance(source, str) and source not in GENERATED
    if not config.eval.path and source == config.data.path and stored and not has_splits(source):
        raise ConfigError(
            f"data.path={source!r} has no splits, so the held-out set would be the training set. Set eval.path to other "
            "prompts, or eval.every=0 to turn evaluation off."
        )
    return rows_to_measure(setup, source)


def rows_to_measure(setup: Setup, source: Any) -> Any:
    """Load the rows of a data set as those for evaluation."""
    return _load(setup, source, setup.config.eval.split, setup.config.eval.limit)


def _load(setup: Setup, source: Any, split: str, limit: int | None) -> Any:
    """Load rows of a source, or let the environment or a built-in task generate them."""
    config, prompts = setup.config, setup.env_class.prompts
    if prompts is not None and source is not None:
        raise ConfigError(
            f"The environment {setup.env_class.__name__} has its own prompts. Remove data.path and eval.path."
        )
    if prompts is not None or (isinstance(source, str) and source in GENERATED):
        if config.data.system_prompt is not None or config.data.prompt_template is not None:
            raise ConfigError(
                "data.system_prompt and data.prompt_template have no effect on generated prompts. Remove them; some "
                "environments have options of these names."
            )
        rows = (
            make_prompts(setup.env_class, config.env, split, limit)
            if prompts
            else GENERATED[source](split, limit)
        )
        columns = load("rl4llm.data.answers:ANSWER_COLUMNS").get(setup.needs.learns_from, ())
        if lacking := [name for row in rows[:1] for name in columns if name not in row]:
            what = f"{source or config.env['name']} generates prompts for episodes, without {lacking[0]!r}"
            raise ConfigError(f"{what}. Set data.path to a dataset with this column.")
    elif source is None:
        raise ConfigError("data.path is not set. Set it in the YAML file, or with data.path=...")
    else:
        rows = stored_rows(config, source, split, limit, setup.needs.learns_from)
    name = config.env["name"] if source is None else type(source).__name__
    name = source if isinstance(source, str) else name
    setup.identity.add_rows(f"{name}, {split}, {limit or 'all'}", rows)
    return rows


def stored_rows(config: Config, source: Any, split: str, limit: int | None, learns_from: LearnsFrom) -> Any:
    """Load rows as the section `data` describes them."""
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
        bad_rows=data.bad_rows,
        images=config.model.vision != "none",
    )


def prompt_stream(setup: Setup, dataset: Any, least: float | None = None) -> PromptStream:
    """Make the order in which this process plays its share of the prompts; `least` makes it follow their success."""
    config, ranks = setup.config, setup.machine.ranks
    order: dict[str, Any] = {
        "rank": ranks.rank,
        "world_size": ranks.size,
        "seed": config.seed,
        "shuffle": config.data.shuffle,
    }
    if least is None:
        return PromptStream(len(dataset), config.rollout.prompts, **order)
    name_of = cache(lambda row: str(dataset[row].get("prompt_id", row)))  # a row may hold images
    curriculum = load("rl4llm.data.curriculum:PromptCurriculum")
    return curriculum(len(dataset), config.rollout.prompts, name_of=name_of, least=least, **order)


def prompts_of(setup: Setup, datasets: Mapping[str, Any]) -> PromptStream | MixedPrompts:
    """Make the order in which this process plays its share of the prompts: of the environments, by name, or the only one."""
    config = setup.config
    if config.parts:
        return _mixed_prompts(setup, datasets, config.curriculum)
    if not isinstance(config.curriculum, str):
        return prompt_stream(setup, datasets[""], config.curriculum)
    pools = load("rl4llm.data.mixture:pools")(datasets[""], config.curriculum)
    return _mixed_prompts(setup, pools, LEAST, pools)


def _mixed_prompts(
    setup: Setup, datasets: Mapping[str, Any], least: Any, rows: Mapping[str, Sequence[int]] | None = None
) -> MixedPrompts:
    """Make the order over several datasets, or over pools of one, which `rows` then lists; a pool weighs as its size."""
    config, ranks, environments = setup.config, setup.machine.ranks, setup.config.environments
    streams, weights = {}, {}
    for name, dataset in datasets.items():
        part = config.parts.get(name, {})
        seed = derive_seed(config.seed, "pool" if rows else "part", name)
        shuffle = environments.get(name, config).data.shuffle
        streams[name] = PromptStream(len(dataset), 1, seed=seed, shuffle=shuffle)
        weights[name] = len(dataset) if rows else part.get("weight", 1.0)
    return load("rl4llm.data.mixture:MixedPrompts")(
        streams,
        weights,
        batch_size=config.rollout.prompts,
        rank=ranks.rank,
        world_size=ranks.size,
        curriculum=least,
        rows=rows,
    )


def fit_datasets(
    env: BaseMDPEnv,
    held_out: BaseMDPEnv | None,
    renderer: Renderer,
    context_length: int,
    setup: Setup,
    prefix: str,
) -> list[str]:
    """Keep the rows of environments whose prompts leave room for an answer; return warnings that begin with `prefix`.

    They count the rows that were left out, and the held-out prompts that are also in the training data.
    """
    config, warnings = setup.config, _unread_replies(env, setup.config, prefix)
    warnings += _late_compaction(env, setup.config, renderer, context_length, prefix)
    if held_out and config.max_steps:  # an evaluation has no training data
        overlap_warnings = load("rl4llm.data.overlap:overlap_warnings")
        warnings += overlap_warnings(env.dataset, held_out.dataset, f"{prefix}eval")
    for part, where in ((env, "data"), (held_out, "eval")):
        if part is not None:
            rows = part.dataset
            part.dataset = fitting_prompts(rows, part, renderer, context_length, config, where)
            warnings += dropped(rows, part.dataset, f"{prefix}{where}")
    return warnings


def _unread_replies(env: BaseMDPEnv, config: Config, prefix: str) -> list[str]:
    """Return a warning if an environment of the user answers, and the default of one turn ends each episode before."""
    answers = not type(env).respond.__module__.startswith("rl4llm.")
    if not answers or env.max_steps > 1 or "max_steps" in config.env:
        return []
    return [
        f"{prefix}env: the policy reads no message that {type(env).__name__}.respond returns: an episode has one turn. "
        "Set env.max_steps to the number of turns; env.max_steps=1 keeps one."
    ]


def _late_compaction(
    env: BaseMDPEnv, config: Config, renderer: Renderer, context_length: int, prefix: str
) -> list[str]:
    """Return a warning if the context may end before a history that is long enough has its summary."""
    if env.compact_at is None:
        return []
    request, summary = len(renderer.encode(load("rl4llm.envs.compaction:REQUEST"))), config.rollout.max_tokens
    if (beyond := env.compact_at + request + summary - context_length) <= 0:
        return []
    return [
        f"{prefix}env.compact_at={env.compact_at}: a context of {context_length} tokens may end an episode before its "
        f"summary, which takes {request} tokens for the request and up to rollout.max_tokens={summary}. "
        f"Lower env.compact_at or rollout.max_tokens by {beyond} or more."
    ]


def fitting_prompts(
    rows: Any, env: BaseMDPEnv, renderer: Renderer, context_length: int, config: Config, where: str
) -> Any:
    """Return the rows whose prompts leave room for an answer; raise DataError for others unless data.bad_rows=skip."""
    limit = context_length - 1
    check_texts(rows, partial(policy_openings, env), renderer, where)

    def length(number: int) -> int | None:
        row_renderer, openings = renderer.of_row(rows[number]), policy_openings(env, rows[number])
        return next(filter(None, (row_renderer.prompt_too_long(item, limit) for item in openings)), None)

    skip = config.data.bad_rows == "skip"
    return usable_rows(rows, unfit(range(len(rows)), length, limit, skip=skip), skip=skip)


def check_texts(
    rows: Any,
    conversations: Callable[[Mapping[str, Any]], Iterable[Sequence[ChatMessage]]],
    renderer: Renderer,
    where: str,
) -> None:
    """Raise SpecialTokenError, with the place of the row, if texts contain special tokens and those are refused."""
    for number in range(len(rows) if renderer.refuses_text else 0):
        for messages in conversations(rows[number]):
            try:
                renderer.check(messages)
            except SpecialTokenError as error:
                raise SpecialTokenError(f"{where}: {place(rows, number)}: {error}") from error


def micro_batch_plan(
    config: Config,
    batching: Batching,
    played: Sequence[tuple[BaseMDPEnv, Renderer, int]],
    context_length: int,
) -> BatchPlan:
    """Plan how prompts x samples become micro-batches, assuming the environment with the longest episodes.

    `played` are environments, each with its renderer and the tokens of a turn.
    """
    longest, new_tokens = max((_longest(*each, context_length) for each in played), key=sum)
    return plan_batches(
        prompts=config.rollout.prompts,
        samples=config.rollout.group_size,
        max_prompt_tokens=longest,
        max_new_tokens=new_tokens,
        max_tokens_per_batch=batching.budget([longest + new_tokens]),
        layout=batching.layout,
        updates=config.training.updates_per_rollout,
        roles=max(len(env.trained_roles) for env, _, _ in played),
    )


def _longest(env: BaseMDPEnv, renderer: Renderer, turn_tokens: int, context_length: int) -> tuple[int, int]:
    """Return the tokens of the longest prompt, and of what may follow it."""
    longest = max(
        renderer.of_row(row).length(messages)
        for row in longest_rows(env.dataset, LONGEST, vision=env.vision)
        for messages in policy_openings(env, row)
    )
    lines = env.max_steps * len(env.roles)  # each role reads what the others say
    return longest, min(lines * turn_tokens, context_length - longest)


def policy_openings(env: BaseMDPEnv, row: Mapping[str, Any]) -> list[list[ChatMessage]]:
    """Return the prompts that the policy gets from a row, one for each role that it plays."""
    openings = env.openings(row)
    return [openings[role] for role in env.policy_roles]


def longest_rows(
    rows: Any, count: int, columns: Sequence[str] = ("messages",), vision: Vision | None = None
) -> list[Mapping[str, Any]]:
    """Return the rows with the most text and images in these columns of messages."""
    return [rows[number] for number in by_size(rows, columns, vision)[:count]]


def by_size(rows: Any, columns: Sequence[str], vision: Vision | None) -> list[int]:
    """Return the numbers of the rows, those with the most text and images first; `vision` counts the tokens of images."""

    def size(number: int) -> int:
        items = (item for column in columns for item in rows[number][column])
        messages = [item if isinstance(item, ChatMessage) else ChatMessage.from_dict(item) for item in items]
        texts = sum(len(message.content) + len(str(message.tool_calls or "")) for message in messages)
        pictures = (picture for message in messages for picture in message.pictures)
        return texts + sum(CHARACTERS * vision.count(picture) for picture in pictures if vision)

    return sorted(range(len(rows)), key=size, reverse=True)
