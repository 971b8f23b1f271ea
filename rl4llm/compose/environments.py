"""From names and options to environments, their rewards and opponents, and what a run provides to them all."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any, Literal

from rl4llm.compose.models import vision_of
from rl4llm.compose.setup import Setup, stale_note
from rl4llm.config import Config
from rl4llm.config.keys import RolloutConfig
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction
from rl4llm.core.base_reward import needs_ground_truth
from rl4llm.core.errors import ConfigError, DataError, unknown
from rl4llm.core.registry import elsewhere, from_extension, imported, load
from rl4llm.core.schema import Count, accepted_options, check_values, fits, refusal, with_options
from rl4llm.core.tables import OPPONENTS
from rl4llm.data.columns import TOOLS
from rl4llm.data.lengths import SHOWN, place, rows_without, usable_rows
from rl4llm.data.load import Rows
from rl4llm.rewards import as_reward_function
from rl4llm.runtime.ranks import Ranks


@dataclass(frozen=True, slots=True)
class EnvKeys:
    """Keys of ``env`` that every environment has, besides the options of its class; see docs/environments.md."""

    name: str = "chat"
    remote: str | list[str] | None = None
    remote_ca: str | None = None
    reward_transform_fn: Any = None
    template_args: Mapping[str, Any] | None = None
    thoughts: Literal["keep", "drop", "refuse"] = "keep"
    compact_at: Count | None = None


COMMON = frozenset(EnvKeys.__annotations__)
OF_TRAINER = COMMON - {"template_args", "thoughts"}
"""Those that a host of environments does not need."""

FIXED = (
    "dataset", "tokenizer", "reward_functions", "batch_size", "group_size", "rank", "world_size", "seed", "shuffle_dataset",
    "reward_transform_fn",
)  # fmt: skip
"""Parameters of environments that other sections of a configuration set."""

THE_POLICY = "policy"


def with_hosts(setup: Setup) -> Setup:
    """Ask the hosts of `env.remote`, if set, for the environment; return a setup with its stand-in."""
    config, objects = setup.config, setup.given
    if not config.env.get("remote") or setup.needs.learns_from != "episodes":
        return setup
    if objects.reward_functions is not None or objects.env_class is not None:
        raise ConfigError(
            "env.remote takes no Python objects as reward_functions or env. Use registered names."
        )
    hosted = from_extension("hosted_environment", "env.remote")(config.env)
    return replace(setup, given=replace(objects, hosted=hosted))


def build_env(
    setup: Setup,
    dataset: Any,
    rewards: Sequence[BaseRewardFunction],
    transform: Any,
    provided: Mapping[str, Any],
) -> BaseMDPEnv:
    """Make the environment with its options, and with those `provided` objects that it has a parameter for."""
    config, tokenizer, ranks = setup.config, setup.tokenizer, setup.machine.ranks
    dataset = readable_rows(dataset, rewards, skip=config.data.bad_rows == "skip")
    fixed = {
        "dataset": dataset,
        "tokenizer": tokenizer,
        "reward_functions": rewards,
        "batch_size": config.rollout.prompts,
        "group_size": config.rollout.group_size,
        "rank": ranks.rank,
        "world_size": ranks.size,
        "seed": config.seed,
        "shuffle_dataset": config.data.shuffle,
        "reward_transform_fn": transform,
    }
    if hosted := setup.given.hosted:  # hosts have its options
        env = _rendered_by(hosted(opponents=provided.get("opponents"), **fixed), config.env)
    else:
        env = make_env(setup.env_class, config.env, provided, **fixed)
    env.special_tokens, env.vision = config.data.special_tokens, vision_of(config)
    env.pool_column = config.curriculum if isinstance(config.curriculum, str) else None
    if not env.tool_schemas and (example := example_of_calls(dataset, tokenizer, env.template_args)):
        env.call_example = example
    return env


def _rendered_by(env: BaseMDPEnv, options: Mapping[str, Any]) -> BaseMDPEnv:
    """Give an environment the options that change how its prompts are written."""
    env.template_args = options.get("template_args") or env.template_args
    env.thoughts = options.get("thoughts", env.thoughts)
    env.compact_at = options.get("compact_at", env.compact_at)
    return env


def unset_notes(setup: Setup, env: BaseMDPEnv) -> Iterator[str]:
    """Yield lines that name options for older samples, and the rewards and the length of turns that the user did not set."""
    config = setup.config
    yield from filter(None, [stale_note(config)])
    if config.rewards is None and setup.given.reward_functions is None:
        names = ", ".join(reward.name for reward in env.reward_functions)
        yield f"rewards is not set: {names or 'only the rewards of turns count'}, as {type(env).__name__} defines"
    limit, chosen = config.rollout.max_tokens, config.origin.keys
    if limit == RolloutConfig.max_tokens and not any(key.endswith("rollout.max_tokens") for key in chosen):
        yield f"rollout.max_tokens is not set: a turn is cut off after {limit} tokens"


def check_curriculum(config: Config, envs: Sequence[BaseMDPEnv]) -> None:
    """Raise ConfigError if a curriculum follows successes that no reward of an environment defines."""
    for env in envs if config.curriculum is not None else ():
        if env.success_at is None and all(reward.success_at is None for reward in env.reward_functions):
            raise ConfigError(
                f"curriculum={config.curriculum!r} draws prompts by their successes, but no reward defines it. Give one "
                "the lowest score of a success, such as rewards=[{name: NAME, success_at: 1}]."
            )


def example_of_calls(rows: Any, tokenizer: Any, template_args: Mapping[str, Any] | None) -> str:
    """Return a call for prompts that describe the tools of rows in place of a chat template; "" if rows have none."""
    if not any(row.get(TOOLS) for row in rows):
        return ""
    find = load("rl4llm.envs.tools.formats:call_format")
    return find("auto", tokenizer, shown=False, template_args=template_args).example


def readable_rows(rows: Any, rewards: Sequence[BaseRewardFunction], *, skip: bool) -> Any:
    """Return the rows of a dataset that each reward can score.

    Raises DataError, with the place of the row, for the first other one; with `skip` only if no row is left.
    """
    if not isinstance(rows, Rows):
        return rows
    faults = {number: fault for number, row in enumerate(rows) if (fault := _fault(row, rewards))}
    return usable_rows(rows, faults, skip=skip)


def _fault(row: Mapping[str, Any], rewards: Sequence[BaseRewardFunction]) -> str:
    """Return why a reward, or one inside it, cannot score a row, "" if all can."""
    columns = {name: row[name] for name in row if name not in ("prompt_id", "messages", "ground_truth")}
    truth = row["ground_truth"]
    for reward in rewards:
        is_missing = truth is None or (isinstance(truth, numbers.Real | Decimal) and truth != truth)  # NaN
        if is_missing and needs_ground_truth(reward):
            return (
                f"the row has no ground truth, with which the reward {reward.name!r} compares answers. Next: fill it in, or "
                f"set data.answer_column to its column (the row has: {', '.join(columns) or 'no other column'})."
            )
        try:
            reward.check_row(truth, columns)
        except DataError as error:
            return str(error)
        if fault := _fault(row, reward.parts):
            return fault
    return ""


def without_faulty_rows(
    rows: Any, rewards: Sequence[BaseRewardFunction], where: str, ranks: Ranks
) -> tuple[Any, list[str]]:
    """Leave out rows that a reward cannot score fairly, and return a warning that names them.

    The first rank asks the rewards, so that all ranks leave out the same rows. Raises DataError if none is left.
    """
    faults = ranks.share(_faulty_rows(rows, rewards) if ranks.is_first else None)
    if not faults:
        return rows, []
    examples = "; ".join(f"{place(rows, number)}: {faults[number]}" for number in sorted(faults)[:SHOWN])
    rest = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    text = f"{where}: {len(faults)} of {len(rows)} rows cannot be scored and were left out: {examples}{rest}."
    if len(faults) == len(rows):
        raise DataError(f"{text} Next: correct the rows, or choose other rewards.")
    return rows_without(rows, faults), [text]


def check_columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raise DataError for a row without a text in one of these columns."""
    for number, row in enumerate(rows if names else ()):
        if empty := [name for name in names if not isinstance(row.get(name), str) or not row[name]]:
            problem = f"{place(rows, number)}: no text in {empty}, which the algorithm needs"
            raise DataError(f"{problem}. Add it, or set another column.")


def _faulty_rows(rows: Any, rewards: Sequence[BaseRewardFunction]) -> dict[int, str]:
    faults: dict[int, str] = {}
    for reward in rewards:
        faults |= _faulty_rows(rows, reward.parts) | dict(reward.faulty_rows(rows))
    return faults


def build_rewards(
    setup: Setup, provided: Mapping[str, Any], row: Mapping[str, Any]
) -> tuple[list[BaseRewardFunction], Any]:
    """Make the rewards of a run, and the function that combines them; None if there is only one."""
    config, objects = setup.config, setup.given
    if objects.reward_functions is not None:
        return [as_reward_function(item) for item in objects.reward_functions], objects.reward_transform_fn
    named = setup.env_class.rewards_for(row) if config.rewards is None else config.rewards
    specs, factors = zip(*(weighed(item) for item in named), strict=True) if named else ((), ())
    rewards = (
        objects.hosted.rewards(specs, setup.tokenizer, row, config.seed)
        if objects.hosted
        else make_rewards(specs, provided)
    )
    # Rewards per turn are added to the result of the transform, which combines the terminal rewards.
    pairs = list(zip(rewards, factors, strict=True))
    scaled = "rl4llm.rewards.wrappers:Scale"
    functions = [load(scaled)(*pair) if pair[0].per_turn else pair[0] for pair in pairs]
    weights = {function.name: weight for function, weight in pairs if not function.per_turn}
    if config.env.get("reward_transform_fn") is not None:
        return functions, _transform(config.env["reward_transform_fn"], weights)
    if not weights or list(weights.values()) == [1.0]:
        return functions, None
    return functions, load("rl4llm.rewards.combine:weighted_sum")(weights)


def _transform(name: Any, weights: Mapping[str, float]) -> Any:
    """Return the function that replaces the weights of the terminal rewards; raise ConfigError if they have weights too."""
    if set(weights.values()) - {1.0}:
        raise ConfigError(
            f"env.reward_transform_fn={name!r} ignores the weights of rewards. Remove one of them."
        )
    return name if callable(name) else imported("env.reward_transform_fn", str(name))


def weighed(item: Any) -> tuple[Any, float]:
    """Split a reward of a configuration into its options and its weight."""
    if not isinstance(item, str | Mapping):
        raise ConfigError(f"rewards has {item!r:.100}. Accepted: a name, or a mapping with name and options.")
    options = {"name": item} if isinstance(item, str) else dict(item)
    weight = options.pop("weight", 1.0)
    if not fits(weight, float):
        raise ConfigError(refusal(f"rewards: weight of {options.get('name')!r}", weight, float))
    return options, float(weight)


def make_rewards(specs: Sequence[Any], provided: Mapping[str, Any]) -> list[BaseRewardFunction]:
    """Make rewards from names, or from mappings of a name and options."""
    return [as_reward_function(spec, provided=provided) for spec in specs]


def make_env(
    env_class: Any, options: Mapping[str, Any], provided: Mapping[str, Any], **fixed: Any
) -> BaseMDPEnv:
    """Make an environment with a user's options, except those that only concern its prompts.

    It gets those `provided` objects, such as the sandbox, that it has a parameter for.
    """
    of_prompts = (
        accepted_options(env_class.prompts) - accepted_options(env_class) if env_class.prompts else ()
    )
    chosen = {name: value for name, value in options.items() if name not in (*COMMON, *of_prompts)}
    accepted = accepted_options(env_class)
    objects = {name: provided[name] for name in provided if name in accepted}
    if "provided" in accepted:  # tools get what all environments share; opponents belong to one environment
        shared = (name for name in provided if name != "opponents")
        objects["provided"] = Provided({name: partial(provided.__getitem__, name) for name in shared})
    chosen = {name: value for name, value in chosen.items() if name not in objects}
    env = with_options("env", env_class, chosen, **fixed, **objects)
    return _rendered_by(env, options)


def check_env_options(env_class: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that neither an environment nor its prompts accept; make nothing."""
    of_prompts = accepted_options(env_class.prompts) - {"split", "limit"} if env_class.prompts else set()
    of_env = accepted_options(env_class) - {*FIXED, "sandbox", "provided"}
    for name in options:
        if name not in of_env | of_prompts | COMMON:
            message = unknown("env option", name, of_env | of_prompts | COMMON)
            raise ConfigError(elsewhere("key", f"env.{name}") or message)
    check_values("env", EnvKeys, options)
    class_options = {name: value for name, value in options.items() if name not in COMMON}
    for make in filter(None, (env_class, env_class.prompts)):
        check_values("env", make, class_options)
    for item in class_options.get("tools") or ():
        load("rl4llm.envs.tools.tool:check_tool")(item)


def make_prompts(
    env_class: Any, options: Mapping[str, Any], split: str, limit: int | None
) -> Sequence[Mapping[str, Any]]:
    """Return the prompts of an environment, made with those of its options that concern them."""
    accepted = accepted_options(env_class.prompts)
    chosen = {name: value for name, value in options.items() if name in accepted}
    return with_options("env", env_class.prompts, chosen, split, limit)


def build_opponents(setup: Setup) -> Any:
    """Make the opponent of each role; return None if the configuration names none, so that the environment's own play.

    The environment refuses anything but a mapping of roles to opponents.
    """
    chosen = setup.config.env.get("opponents")
    if chosen is None or "opponents" not in accepted_options(setup.env_class):
        return None
    if not isinstance(chosen, Mapping):
        return chosen
    return {
        role: _opponent(setup, role, item) for role, item in chosen.items() if item not in (None, THE_POLICY)
    }


def _opponent(setup: Setup, role: str, item: Any) -> Any:
    if not isinstance(item, str | Mapping):
        return item
    options = {"name": item} if isinstance(item, str) else {"name": "server", **item}
    name = options.pop("name")
    opponent = OPPONENTS[name]
    if name not in OPPONENTS and not isinstance(opponent, type):
        return opponent  # a function of the messages
    ours = {"dtype": setup.machine.dtype, "device": setup.machine.device}
    fixed = {name: value for name, value in ours.items() if name in accepted_options(opponent)}
    return with_options(f"env.opponents.{role}", opponent, options, **fixed)


class Provided(Mapping[str, Any]):
    """Objects of a run, each made on first use.

    A class that has a parameter of one of these names gets the object: ``def __init__(self, sandbox): ...``.
    """

    def __init__(self, make: Mapping[str, Callable[[], Any]]):
        self._make = make
        self.made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = self._make[name]()
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)


def provided_by(setup: Setup, sandbox: Callable[[], Any]) -> Provided:
    """Offer the sandbox, which all environments of a run share, and the opponents of one environment."""
    return Provided({"sandbox": sandbox, "opponents": lambda: build_opponents(setup)})


def build_sandbox(config: Config) -> Any:
    """Make the sandbox of the run; it starts nothing before it is used."""
    return from_extension("sandbox", "The section `sandbox`")(**vars(config.sandbox))
