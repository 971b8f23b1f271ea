"""From a configuration to a trainer that is ready to run."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import xxhash

from rl4llm.algorithms import ALGORITHMS
from rl4llm.backends.learned_reward import LearnedReward
from rl4llm.backends.models import load_tokenizer
from rl4llm.build.data import (
    LOOKED_AT,
    check_prompts,
    environment_of,
    held_out_rows,
    longest_rows,
    micro_batch_plan,
    mixed_prompts,
    prompt_stream,
    roles_between,
    row_reader,
    training_rows,
)
from rl4llm.build.engines import build_canary, build_client, build_publisher, check_adapter_alone, check_parts, check_sync
from rl4llm.build.environments import HostedEnvironment, make_env, make_rewards
from rl4llm.build.models import (
    BACKENDS,
    all_ranks,
    build_critic,
    build_policy,
    build_reference,
    device_of,
    plain_model,
    set_up_torch,
)
from rl4llm.build.opponents import build_opponents
from rl4llm.build.options import Given, with_options
from rl4llm.config import Config, by_part, flatten, to_yaml
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.core.base_backend import BaseBackend
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction
from rl4llm.core.base_trainer import Schedule
from rl4llm.core.errors import ConfigError, RL4LLMError, RunDirError, unknown
from rl4llm.core.registry import imported
from rl4llm.core.run_dir import RunDir
from rl4llm.core.types import SamplingParams
from rl4llm.data.answers import ANSWER_COLUMNS
from rl4llm.data.demonstrations import check_rows
from rl4llm.data.render import Renderer
from rl4llm.envs import ENVIRONMENTS
from rl4llm.envs.mixture import MixedRollout
from rl4llm.envs.rollout import Rollout
from rl4llm.inference.judge import LLMJudge
from rl4llm.rewards import Scale, as_reward_function, check_examples, register_reward, weighted_sum
from rl4llm.sandbox import Sandbox
from rl4llm.tracking.console import Mode
from rl4llm.tracking.redact import redacted
from rl4llm.tracking.run import RunTracker
from rl4llm.tracking.tracker import check_installed
from rl4llm.trainers.dataset import DatasetTrainer
from rl4llm.trainers.prepare import Batching, Preparation
from rl4llm.trainers.rl import Inference, RLTrainer

register_reward("reward_model")(LearnedReward)
register_reward("llm_judge")(LLMJudge)


T = TypeVar("T")
MAY_CHANGE = (
    "max_steps", "threads", "timeout_s", "backend.", "eval.", "checkpoint.", "tracking.", "output.", "inference.", "sync.",
    "mismatch.", "rollout.max_failed_share", "training.max_skipped", "sandbox.", "env.remote", "launch.",
)  # fmt: skip
"""Keys that a resumed run may change without becoming another run."""


AnyTrainer = RLTrainer | DatasetTrainer
"""What `build_trainer` returns: one that samples episodes, or one that reads a dataset."""


def build_trainer(config: Config, given: Given | None = None, *, force: bool = False) -> AnyTrainer:
    """Everything a run needs, checked; raises an RL4LLMError before any file of the run is touched where it can."""
    given = given or Given()
    ranks = all_ranks(config)
    set_up_torch(config)
    algorithm = build_algorithm(config)
    check_choices(config, given, algorithm.needs())
    check_installed(_trackers(config))
    tokenizer = given.tokenizer or load_tokenizer(config.model.path, pad_token=config.model.pad_token)
    learns_from = algorithm.needs().learns_from
    parts = {name: (part, in_part(name, with_hosts, part, given, algorithm)) for name, part in by_part(config).items()}
    datasets = {name: in_part(name, training_rows, *part, learns_from) for name, part in parts.items()}
    make: Callable[[RunDir], AnyTrainer]
    if learns_from == "episodes":
        make = _reinforced(config, given, algorithm, tokenizer, parts, datasets)
    else:
        make = _supervised(config, given, algorithm, tokenizer, datasets[""])
    run = _open_run(config, _given_identity(given, datasets.get("")), force)
    try:
        if ranks.is_first:
            run.write_text("config.yaml", to_yaml(config))
        return make(run)
    except BaseException:
        run.close()
        raise


def _open_run(config: Config, given_identity: Mapping[str, Any], force: bool) -> RunDir:
    """The run's directory, which the first rank holds; when it cannot, no rank goes on."""
    ranks, problem = all_ranks(config), None
    run = RunDir(config.output.dir)
    if ranks.is_first:
        identity = fingerprint(config) | {"rollout.prompts": config.rollout.prompts * ranks.size}  # of all ranks
        settings = {"processes": ranks.size} | settings_of(config)
        try:
            identity |= given_identity
            run = RunDir.open(
                config.output.dir, identity, settings=settings, defaults=flatten(Config()), allow_changes=force
            )
        except RL4LLMError as error:
            problem = error
    if ranks.share(problem is not None):
        raise problem or RunDirError(f"{config.output.dir} cannot be used; the message of rank 0 says why.")
    return run


def build_algorithm(config: Config) -> BaseAlgorithm:
    """The algorithm with its options; raises ConfigError for unknown or impossible ones."""
    options = dict(config.algorithm)
    algorithm = with_options("algorithm", ALGORITHMS[options.pop("name")], options)
    algorithm.check(config.rollout.group_size)
    return algorithm


def check_choices(config: Config, given: Given, needs: Needs) -> None:
    """What can be wrong without opening a single file is said first; raises ConfigError."""
    BACKENDS[config.backend["name"]]
    _check_mixture(config, given, needs.learns_from)
    for name, part in by_part(config).items():
        if not part.env.get("remote"):  # hosts know others
            in_part(name, ENVIRONMENTS.__getitem__, part.env["name"])
    check_sync(config, needs)
    if "lora" in (config.sync.name, config.sync.fallback):
        check_adapter_alone(config)


def with_hosts(config: Config, given: Given, algorithm: BaseAlgorithm) -> Given:
    """Ask the hosts of `env.remote` for the environment."""
    if not config.env.get("remote") or algorithm.needs().learns_from != "episodes":
        return given
    for what, item in (("reward_functions", given.reward_functions), ("env", given.env_class)):
        if item is not None:
            raise ConfigError(f"{what} lives in this process, and env.remote={config.env['remote']} elsewhere: give names.")
    return replace(given, hosted=HostedEnvironment(config.env))


def _check_mixture(config: Config, given: Given, learns_from: str) -> None:
    """What cannot be said of several environments at once."""
    if not config.parts:
        return
    if learns_from != "episodes":
        name = config.algorithm["name"]
        raise ConfigError(f"parts are environments, but algorithm.name={name!r} learns from {learns_from}. Leave them out.")
    for what in ("dataset", "eval_dataset", "reward_functions", "env_class"):
        if getattr(given, what) is not None:
            raise ConfigError(f"{what.removesuffix('_class')} is of one environment, but there are parts: say it in each.")


def in_part(name: str, function: Callable[..., T], *args: Any) -> T:
    """What a function returns; its error says of which part it is."""
    try:
        return function(*args)
    except RL4LLMError as error:
        if not name:
            raise
        raise type(error)(f"parts.{name}: {error}") from error


def fingerprint(config: Config) -> dict[str, Any]:
    """What makes this run this run: every key that a resumed run must not change."""
    return {key: value for key, value in flatten(config).items() if not _of_part(key).startswith(MAY_CHANGE)}


def _of_part(key: str) -> str:
    """A key without the name of its part."""
    return key.split(".", 2)[-1] if key.startswith("parts.") else key


def settings_of(config: Config) -> dict[str, Any]:
    """Every other key, but for where the run lies."""
    own = fingerprint(config)
    return {key: value for key, value in flatten(config).items() if key not in own and key != "output.dir"}


def _given_identity(given: Given, dataset: Any) -> dict[str, Any]:
    """What makes a run from Python objects this run; its configuration names only their types."""
    identity: dict[str, Any] = {}
    if given.dataset is not None:
        text = "\n".join(str(row.get("prompt_id", row)) for row in dataset)
        identity["given.dataset"] = f"{len(dataset)} rows, {xxhash.xxh3_64_hexdigest(text.encode())}"
    if given.model is not None:
        identity["given.model"] = f"{type(given.model).__name__}, {given.model.num_parameters():,} parameters"
    if given.reward_functions is not None:
        names = [getattr(item, "__qualname__", None) or type(item).__qualname__ for item in given.reward_functions]
        identity["given.reward_functions"] = names
    if given.env_class is not None:
        identity["given.env"] = given.env_class.__qualname__
    return identity


def _supervised(
    config: Config, given: Given, algorithm: BaseAlgorithm, tokenizer: Any, dataset: Any
) -> Callable[[RunDir], DatasetTrainer]:
    needs = algorithm.needs()
    _check_supervised(config, given, needs)
    held_out = held_out_rows(config, given, needs.learns_from) or ()
    answers = ANSWER_COLUMNS.get(needs.learns_from, ())
    read = row_reader(needs, Renderer(tokenizer, roles=roles_between(dataset, answers)))
    prompts = prompt_stream(config, dataset)
    start = copy.deepcopy(given.model) if needs.reference else None  # before the policy's weights move
    backend = build_policy(config, algorithm, given.model)
    reference = build_reference(config, algorithm, backend, start, tokenizer)
    prepared = partial(Preparation, algorithm=algorithm, policy=backend, reference=reference, ranks=all_ranks(config))
    batching = batching_of(config, algorithm, tokenizer)
    context_length = backend.model.config.get_text_config().max_position_embeddings
    for rows in (dataset, held_out):
        check_rows(read, longest_rows(rows, LOOKED_AT, ("messages", *answers)), context_length)

    def make(run: RunDir) -> DatasetTrainer:
        tracker = _tracker(config, run)
        return DatasetTrainer(
            dataset=dataset,
            tokenizer=tokenizer,
            read=read,
            prompts=prompts,
            preparation=prepared(batching=batching),
            held_out=held_out,
            measuring=prepared(batching=replace(batching, updates_per_rollout=1, epochs=1)),
            tracker=tracker,
            **_base(config, algorithm, backend, run, tracker),
        )

    return make


def _check_supervised(config: Config, given: Given, needs: Needs) -> None:
    """What has no meaning where nothing is sampled, or cannot work."""
    for what, item in (("reward_functions", given.reward_functions), ("env", given.env_class)):
        if item is not None:
            raise ConfigError(
                f"{what} is not accepted with algorithm.name={config.algorithm['name']!r}, which samples nothing and learns "
                f"from {needs.learns_from} in a dataset. Leave it out."
            )
    if needs.mismatched and config.rollout.prompts < 2:
        raise ConfigError(
            f"rollout.prompts={config.rollout.prompts} is not accepted with algorithm.name={config.algorithm['name']!r}: "
            "each step compares answers with other prompts of the step. Use 2 or more."
        )


@dataclass(frozen=True, slots=True)
class _Task:
    """An environment with its rewards and rows, and with those that are only measured; `part` is its name among several."""

    part: str
    config: Config
    env: BaseMDPEnv
    held_out: BaseMDPEnv | None
    renderer: Renderer

    def rollout(self, **played: Any) -> Rollout:
        own = self.config.rollout
        sampling = {name: getattr(own, name) for name in ("max_tokens", "top_p", "top_k")} | {"stop": tuple(own.stop)}
        return Rollout(self.env, renderer=self.renderer, part=self.part, sampling=sampling if self.part else None, **played)

    def measuring(self, held_out: BaseMDPEnv, **played: Any) -> Rollout:
        own = self.config.rollout
        sampling = {"max_tokens": own.max_tokens, "stop": tuple(own.stop)} if self.part else None
        return Rollout(held_out, renderer=self.renderer, part=self.part, sampling=sampling, **played)

    def check_lengths(self, context_length: int) -> None:
        """Every prompt leaves room for an answer."""
        for env, where in ((self.env, "data"), (self.held_out, "eval")):
            if env is not None:
                check_prompts(env.dataset, env, self.renderer, context_length, where)


def _task(
    part: str, config: Config, given: Given, algorithm: BaseAlgorithm, tokenizer: Any, dataset: Any, sandbox: Sandbox
) -> _Task:
    rewards, transform = build_rewards(config, given, sandbox, tokenizer, dataset[0])
    for name in algorithm.needs().rewards:
        if name not in (known := [reward.name for reward in rewards]):
            raise ConfigError(unknown("a reward that the algorithm asks for", name, known))
    provided = {"sandbox": sandbox, "opponents": build_opponents(config, given)}
    env = build_env(config, given, dataset, tokenizer, rewards, transform, provided)
    rows = held_out_rows(config, given)
    held_out = build_env(config, given, rows, tokenizer, rewards, transform, provided) if rows is not None else None
    renderer = Renderer(tokenizer, env.tool_schemas, roles=env.reply_roles if env.max_steps > 1 else ())
    check_examples(rewards)
    for opponent in env.opponents.values():
        opponent.check()
    return _Task(part, config, env, held_out, renderer)


def _reinforced(
    config: Config,
    given: Given,
    algorithm: BaseAlgorithm,
    tokenizer: Any,
    parts: Mapping[str, tuple[Config, Given]],
    datasets: Mapping[str, Any],
) -> Callable[[RunDir], RLTrainer]:
    sandbox = build_sandbox(config)
    prompts = mixed_prompts(config, datasets) if config.parts else prompt_stream(config, datasets[""])
    tasks = [
        in_part(name, _task, name, *part, algorithm, tokenizer, datasets[name], sandbox) for name, part in parts.items()
    ]
    start = copy.deepcopy(given.model)  # before the policy's weights move
    backend = build_policy(config, algorithm, given.model)
    check_parts(config, backend)
    client = build_client(config, backend.model if backend.whole else plain_model(config, copy.deepcopy(start)), tokenizer)
    for task in tasks:
        in_part(task.part, task.check_lengths, client.context_length)
    sampled = max(task.env.max_steps * task.config.rollout.max_tokens for task in tasks)
    new_tokens = min(client.context_length, sampled)
    batching = batching_of(config, algorithm, tokenizer, longest_completion=new_tokens)
    preparation = Preparation(
        algorithm=algorithm,
        policy=backend,
        batching=batching,
        temperature=config.rollout.temperature or 1.0,
        critic=build_critic(config, algorithm, start),
        reference=build_reference(config, algorithm, backend, start, tokenizer),
        ranks=all_ranks(config),
    )
    longest = [(task.env, task.renderer, task.config.rollout.max_tokens) for task in tasks]
    plan = micro_batch_plan(config, batching, longest, client.context_length).table()
    runner = asyncio.Runner()
    played = {
        "client": client,
        "runner": runner,
        "seed": config.seed,
        "max_failed_share": config.rollout.max_failed_share,
    }

    def make(run: RunDir) -> RLTrainer:
        tracker = _tracker(config, run)
        client.report_to(tracker.warn)
        for task in tasks:
            task.env.report_to(tracker.warn)
        measured = [task.measuring(task.held_out, **played) for task in tasks if task.held_out is not None]
        _tell_of(sandbox, run, tracker, first=all_ranks(config).is_first)
        return RLTrainer(
            inference=Inference(
                client=client,
                runner=runner,
                publisher=build_publisher(config, client, run, tokenizer, tracker),
                canary=build_canary(config, client),
                stop_above=config.mismatch.stop_above,
            ),
            rollout=_together([task.rollout(**played) for task in tasks]),
            prompts=prompts,
            plan=plan,
            sampling_params=_sampling(config),
            eval_params=_sampling(config).replace(temperature=config.eval.temperature, top_p=1.0, top_k=0),
            preparation=preparation,
            tracker=tracker,
            plays_ahead=config.rollout.ahead,
            evaluation=_together(measured) if measured else None,
            **_base(config, algorithm, backend, run, tracker),
        )

    return make


def _together(rollouts: Sequence[Rollout]) -> Rollout | MixedRollout:
    """One rollout of all parts; the only one that there is as it is."""
    return MixedRollout(rollouts) if rollouts[0].part else rollouts[0]


def build_env(
    config: Config,
    given: Given,
    dataset: Any,
    tokenizer: Any,
    rewards: Sequence[BaseRewardFunction],
    transform: Any,
    provided: Mapping[str, Any],
) -> BaseMDPEnv:
    """The environment with its options; of what is `provided` to all it gets what it has a parameter for."""
    fixed = {
        "dataset": dataset,
        "tokenizer": tokenizer,
        "reward_functions": rewards,
        "batch_size": config.rollout.prompts,
        "group_size": config.rollout.group_size,
        "rank": all_ranks(config).rank,
        "world_size": all_ranks(config).size,
        "seed": config.seed,
        "shuffle_dataset": config.data.shuffle,
        "reward_transform_fn": transform,
    }
    if given.hosted:  # the hosts were asked with its options
        return given.hosted(**fixed)
    return make_env(environment_of(config, given), config.env, provided, **fixed)


def build_sandbox(config: Config) -> Sandbox:
    """The sandbox of the run; nothing of it starts before something uses it."""
    chosen = config.sandbox
    return Sandbox(chosen.level, allow_weak=chosen.allow_weak, slots=chosen.slots, packages=chosen.packages)


def _tell_of(sandbox: Sandbox, run: RunDir, tracker: RunTracker, first: bool) -> None:
    """Show how strong the sandbox is that programs run in, and keep it beside what they earn."""
    if sandbox.active is None or not first:
        return
    (tracker.note if sandbox.active.rank > 1 else tracker.warn)(str(sandbox.active))
    run.write_text("sandbox.json", json.dumps(asdict(sandbox.active), indent=1) + "\n")


def build_rewards(
    config: Config, given: Given, sandbox: Sandbox, tokenizer: Any, row: Mapping[str, Any]
) -> tuple[list[BaseRewardFunction], Any]:
    """The rewards of a run, and what makes one number of theirs, None where there is only one."""
    if given.reward_functions is not None:
        return [as_reward_function(item) for item in given.reward_functions], given.reward_transform_fn
    named = environment_of(config, given).default_rewards if config.rewards is None else config.rewards
    specs, factors = zip(*(_weighed(item) for item in named), strict=True) if named else ((), ())
    hosted = given.hosted
    made = hosted.rewards(specs, tokenizer, row, config.seed) if hosted else make_rewards(specs, sandbox)
    # What turns earn is added beside what the transform makes of the terminal rewards.
    pairs = list(zip(made, factors, strict=True))
    functions = [Scale(function, weight) if function.per_turn else function for function, weight in pairs]
    weights = {function.name: weight for function, weight in pairs if not function.per_turn}
    if config.env.get("reward_transform_fn") is not None:
        return functions, _own_transform(config.env["reward_transform_fn"], weights)
    plain = list(weights.values()) == [1.0]
    return functions, None if plain or not weights else weighted_sum(weights)


def _own_transform(name: Any, weights: Mapping[str, float]) -> Any:
    """What combines the terminal rewards in the place of their weights; raises ConfigError where they have some too."""
    where = f"env.reward_transform_fn={name!r}"
    heavy = [reward for reward, weight in weights.items() if weight != 1.0]
    if heavy:
        raise ConfigError(f"{where} is given the rewards as they are, but {heavy[0]!r} has a weight. Give one or the other.")
    transform = name if callable(name) else imported("env.reward_transform_fn", str(name))
    if not callable(transform):
        raise ConfigError(f"{where} is not accepted: a function of the rewards by name, tensors of shape (num_samples,).")
    return transform


def _weighed(item: Any) -> tuple[Any, float]:
    """A reward of a configuration without its weight, and the weight."""
    if not isinstance(item, str | Mapping):
        raise ConfigError(f"rewards: {item!r} is not accepted: a name, or a mapping with name, weight and options.")
    options = {"name": item} if isinstance(item, str) else dict(item)
    weight = options.pop("weight", 1.0)
    if not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"rewards: weight={weight!r} of {options.get('name')!r} is not accepted: a finite number.")
    return options, float(weight)


def batching_of(config: Config, algorithm: BaseAlgorithm, tokenizer: Any, longest_completion: int = 0) -> Batching:
    """How trajectories become micro-batches; `longest_completion` is the usual divisor of the aggregation "constant"."""
    training = config.training
    return Batching(
        layout=training.layout,
        aggregation=algorithm.aggregation,
        pad_token_id=tokenizer.pad_token_id,
        max_tokens_per_batch=training.max_tokens_per_batch,
        usual_tokens_per_batch=16384 if device_of(config) == "cuda" else 2048,
        updates_per_rollout=training.updates_per_rollout,
        epochs=training.epochs,
        constant_length=training.constant_length or longest_completion,
        whole_groups=algorithm.needs().whole_groups,
    )


def _sampling(config: Config) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
    )


def _base(
    config: Config, algorithm: BaseAlgorithm, backend: BaseBackend, run: RunDir, tracker: RunTracker
) -> dict[str, Any]:
    schedule = Schedule(
        config.max_steps,
        config.eval.every,
        config.checkpoint.every,
        config.checkpoint.keep,
        config.training.max_skipped,
        config.timeout_s,
    )
    return {
        "algorithm": algorithm,
        "backend": backend,
        "clock": tracker.clock,
        "schedule": schedule,
        "run": run,
        "ranks": all_ranks(config),
    }


def _tracker(config: Config, run: RunDir) -> RunTracker:
    tracking = config.tracking
    return RunTracker(
        run,
        total_steps=config.max_steps,
        trackers=_trackers(config),
        project=tracking.project,
        episodes_every=tracking.episodes_every,
        episodes_per_step=tracking.episodes_per_step,
        config=flatten(redacted(config)),  # once keys are dotted, which variables are of a command is lost
        ranks=all_ranks(config),
        console=cast(Mode, config.output.console),  # `load_config` has checked it
    )


def _trackers(config: Config) -> list[str]:
    return [name for name in ("tensorboard", "wandb", "mlflow", "trackio") if getattr(config.tracking, name)]
