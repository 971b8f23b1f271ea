"""From a configuration to a trainer that is ready to run."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from rl4llm.backends.model_files import refuse_adapted
from rl4llm.backends.models import check_tokenizer, load_tokenizer
from rl4llm.compose.choices import check_choices, in_part, warnings_of
from rl4llm.compose.data import fit_datasets, held_out_rows, micro_batch_plan, prompts_of, training_rows
from rl4llm.compose.engines import build_canary, build_client, build_publisher, check_parts, free_device
from rl4llm.compose.environments import (
    Provided,
    build_env,
    build_rewards,
    build_sandbox,
    check_columns,
    check_curriculum,
    provided_by,
    unset_notes,
    with_hosts,
    without_faulty_rows,
)
from rl4llm.compose.models import build_critic, build_policy, build_reference, plain_model, vision_of
from rl4llm.compose.setup import Given, Machine, Setup, held, planned_run, refuse_hidden, set_up_torch
from rl4llm.config import Config, flatten
from rl4llm.config.keys import SandboxConfig
from rl4llm.core.base_backend import BaseBackend, models_of
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.registry import load
from rl4llm.core.types import SamplingParams
from rl4llm.data.pack import Batching
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.envs.stream import Staleness
from rl4llm.rewards import check_examples
from rl4llm.runs.run_dir import RunDir
from rl4llm.runtime import devices
from rl4llm.runtime.ranks import join_ranks
from rl4llm.runtime.runner import Runner
from rl4llm.sync.inference import Inference
from rl4llm.tracking.run import RunTracker
from rl4llm.tracking.tracker import check_installed
from rl4llm.trainers.base_trainer import Schedule
from rl4llm.trainers.prepare import Preparation
from rl4llm.trainers.rl import RLTrainer

if TYPE_CHECKING:
    from rl4llm.envs.mixture import MixedRollout
    from rl4llm.trainers.dataset import DatasetTrainer

SUPERVISED = "rl4llm.compose.supervised:build_supervised"
MIXED = "rl4llm.envs.mixture:MixedRollout"
PRIVILEGED = "rl4llm.envs.privileged:PrivilegedRollout"
REPLAY = "rl4llm.trainers.replay:ReplayTrainer"

AnyTrainer: TypeAlias = "RLTrainer | DatasetTrainer"
"""A trainer from `build_trainer`: one that samples episodes, or one that reads a dataset."""


def build_trainer(config: Config, given: Given | None = None, *, force: bool = False) -> AnyTrainer:
    """Check a configuration and make its trainer; write no file of the run before the trainer's `train` or `resume`.

    Raises an RL4LLMError for a configuration, model or dataset that cannot work.
    """
    machine = Machine.of(config, join_ranks(config.timeout_s))
    set_up_torch(config, machine)
    setup = Setup.of(config, given, machine=machine)
    config, given = setup.config, setup.given
    check_choices(config, given, setup.needs)
    refuse_hidden(config)
    check_installed(_trackers(config))
    refuse_adapted(given.model)
    tokenizer = given.tokenizer or load_tokenizer(config.model.path, pad_token=config.model.pad_token)
    check_tokenizer(tokenizer, given.model or config.model.path, given=given.tokenizer is not None)
    setup = replace(setup, tokenizer=tokenizer)
    parts = {
        name: in_part(name, with_hosts, replace(setup, config=part))
        for name, part in config.environments.items()
    }
    datasets = {name: in_part(name, training_rows, part) for name, part in parts.items()}
    setup.identity.add_tokenizer(config.model.path, tokenizer)
    setup.identity.add_code([setup.algorithm])
    run = planned_run(setup, datasets.get(""), force)
    if setup.needs.learns_from != "episodes":
        trainer: DatasetTrainer = load(SUPERVISED)(setup, datasets[""], run)
        return trainer
    return _reinforced(setup, parts, datasets, run)


@dataclass(frozen=True, slots=True)
class Task:
    """An environment with its rewards and rows, and one for evaluation; `part` is its name if there are several."""

    part: str
    setup: Setup
    env: BaseMDPEnv
    held_out: BaseMDPEnv | None
    renderer: Renderer

    def rollout(self, held_out: BaseMDPEnv | None = None, **played: Any) -> Rollout:
        """Return what plays the environment, or the one for evaluation; a part samples with keys that it has for itself."""
        section, env = self.setup.config.rollout, self.env if held_out is None else held_out
        names = ("max_tokens", "top_p", "top_k") if held_out is None else ("max_tokens",)
        options = {name: getattr(section, name) for name in names} | {"stop": tuple(section.stop)}
        sampling = options if self.part else None
        make: Callable[..., Rollout] = Rollout
        if held_out is None and self.setup.needs.privileged:
            make = functools.partial(load(PRIVILEGED), self.setup.algorithm.privileged_prompts)
        return make(env, renderer=self.renderer, part=self.part, sampling=sampling, **played)

    def fit(self, context_length: int) -> list[str]:
        """Keep the rows that rewards can score and whose prompts leave room for an answer; return warnings."""
        prefix = f"parts.{self.part}: " if self.part else ""
        warnings = []
        for env, where in ((self.env, "data"), (self.held_out, "eval")):
            if env is not None:
                arguments = env.reward_functions, f"{prefix}{where}", self.setup.machine.ranks
                env.dataset, dropped_rows = without_faulty_rows(env.dataset, *arguments)
                warnings += dropped_rows
        fitted = self.renderer, context_length, self.setup, prefix
        return warnings + fit_datasets(self.env, self.held_out, *fitted)


def _task(part: str, setup: Setup, dataset: Any, sandbox: Callable[[], Any]) -> Task:
    provided = provided_by(setup, sandbox)
    rewards, transform = build_rewards(setup, Provided({"sandbox": sandbox}), dataset[0])
    for name in setup.needs.rewards:
        if name not in (names := [name for reward in rewards for name in reward.score_names]):
            raise ConfigError(unknown("a reward that the algorithm needs", name, names))
    env = build_env(setup, dataset, rewards, transform, provided)
    check_columns(dataset, setup.needs.columns)
    rows = held_out_rows(setup)
    held_out = build_env(setup, rows, rewards, transform, provided) if rows is not None else None
    setup.identity.add_code([type(env), *(item for name, item in vars(env).items() if name != "dataset")])
    renderer = Renderer.of(env, setup.tokenizer)
    check_examples(rewards)
    for opponent in env.opponents.values():
        opponent.check()
    return Task(part, setup, env, held_out, renderer)


def _reinforced(
    setup: Setup, parts: Mapping[str, Setup], datasets: Mapping[str, Any], run: RunDir
) -> RLTrainer:
    config, objects, algorithm, machine = setup.config, setup.given, setup.algorithm, setup.machine
    shared = Provided({"sandbox": lambda: build_sandbox(config)})
    if config.sandbox != SandboxConfig():
        shared["sandbox"]  # refuses a wrong level; it starts nothing
    free_device(setup)  # rewards and opponents may load models too
    tasks = [
        in_part(name, _task, name, part, datasets[name], lambda: shared["sandbox"])
        for name, part in parts.items()
    ]
    check_curriculum(config, [task.env for task in tasks])
    start = copy.deepcopy(objects.model)  # before training changes the policy's weights
    backend = build_policy(setup)
    check_parts(setup, backend)
    client = build_client(setup, backend.model if backend.whole else plain_model(setup, copy.deepcopy(start)))
    warnings = [text for task in tasks for text in in_part(task.part, task.fit, client.context_length)]
    prompts = prompts_of(setup, {task.part: task.env.dataset for task in tasks})
    sampled = max(task.env.max_steps * task.setup.config.rollout.max_tokens for task in tasks)
    critic, reference = build_critic(setup, start), build_reference(setup, backend, start)
    beside = [one for one in models_of(critic, reference) if one is not backend]
    preparation = Preparation(
        algorithm=algorithm,
        policy=backend,
        batching=batching_of(setup, [backend, *beside], min(client.context_length, sampled)),
        temperature=config.rollout.temperature or 1.0,
        critic=critic,
        reference=reference,
        ranks=machine.ranks,
    )
    longest = [(task.env, task.renderer, task.setup.config.rollout.max_tokens) for task in tasks]
    plan = micro_batch_plan(config, preparation.batching, longest, client.context_length).table()
    run = held(setup, run)
    templates = [f"Chat template: {note}." for task in tasks for note in task.renderer.notes]
    unset = [note for task in tasks for note in unset_notes(task.setup, task.env)]
    warnings = [*warnings_of(config), *warnings, *templates, *backend.warnings()]
    tracker = tracker_of(setup, run, warnings, [client.path(), backend.path(), *unset])
    client.report_to(tracker.warn)
    for task in tasks:
        task.env.report_to(tracker.warn)
    _report_isolation(shared.made.get("sandbox") if machine.ranks.is_first else None, run, tracker)
    played: dict[str, Any] = {"client": client, "runner": Runner(), "seed": config.seed}
    played["max_failed_share"] = config.rollout.max_failed_share
    measured = [task.rollout(task.held_out, **played) for task in tasks if task.held_out is not None]
    return _trainer_class(config)(
        inference=Inference(
            client=client,
            runner=played["runner"],
            ranks=machine.ranks,
            publisher=build_publisher(setup, client, run, tracker, beside),
            canary=build_canary(setup, client) if config.sync.verify else None,
            stop_above=config.mismatch.stop_above,
        ),
        rollout=_together([task.rollout(**played) for task in tasks]),
        prompts=prompts,
        plan=plan,
        sampling_params=sampling_of(config),
        eval_params=sampling_of(config).replace(temperature=config.eval.temperature, top_p=1.0, top_k=0),
        preparation=preparation,
        staleness=Staleness(config.rollout.max_staleness, repeatable=config.deterministic),
        evaluation=_together(measured) if measured else None,
        **base_of(setup, backend, run, tracker),
    )


def _trainer_class(config: Config) -> Callable[..., RLTrainer]:
    max_age = config.rollout.replay
    return functools.partial(load(REPLAY), max_age=max_age) if max_age else RLTrainer


def _together(rollouts: Sequence[Rollout]) -> Rollout | MixedRollout:
    """Return one rollout of all parts; a single rollout is returned unchanged."""
    return load(MIXED)(rollouts) if rollouts[0].part else rollouts[0]


def _report_isolation(sandbox: Any, run: RunDir, tracker: RunTracker) -> None:
    """Show how strongly the sandbox isolates programs, and write it into the run's directory."""
    if sandbox is not None and sandbox.active is not None:
        (tracker.note if sandbox.active.rank > 1 else tracker.warn)(str(sandbox.active))
        run.keep("sandbox.json", json.dumps(asdict(sandbox.active), indent=1) + "\n")


def batching_of(setup: Setup, models: Sequence[BaseBackend] = (), longest_completion: int = 0) -> Batching:
    """Make the settings of micro-batches that `models` read; `longest_completion` is the default divisor of "constant"."""
    training, vision = setup.config.training, vision_of(setup.config)
    return Batching(
        layout=functools.reduce(lambda layout, model: model.layout(layout), models, training.layout),
        aggregation=setup.algorithm.aggregation,
        pad_token_id=setup.tokenizer.pad_token_id,
        max_tokens_per_batch=training.max_tokens_per_batch,
        usual_tokens_per_batch=16384 if setup.machine.on_gpu else 2048,
        updates_per_rollout=training.updates_per_rollout,
        passes_per_rollout=training.passes_per_rollout,
        constant_length=training.constant_length or longest_completion,
        whole_groups=setup.needs.whole_groups,
        positions=None if vision is None else vision.positions,
        tokenizer=setup.tokenizer,
    )


def sampling_of(config: Config) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
    )


def base_of(setup: Setup, backend: BaseBackend, run: RunDir, tracker: RunTracker) -> dict[str, Any]:
    """Return the arguments that all trainers have in common."""
    config = setup.config
    schedule = Schedule(
        config.max_steps,
        config.eval.every,
        config.checkpoint.every,
        config.checkpoint.keep,
        config.training.max_skipped,
        config.timeout_s,
    )
    return {
        "algorithm": setup.algorithm,
        "backend": backend,
        "tracker": tracker,
        "schedule": schedule,
        "run": run,
        "code": setup.identity.code,
        "ranks": setup.machine.ranks,
    }


def tracker_of(setup: Setup, run: RunDir, warnings: Sequence[str], notes: Sequence[str] = ()) -> RunTracker:
    """Make the tracker of a run; the first rank shows how it computes, and the warnings and notes that all ranks found."""
    config, ranks = setup.config, setup.machine.ranks
    tracking = config.tracking
    tracker = RunTracker(
        run,
        total_steps=config.max_steps,
        trackers=_trackers(config),
        project=tracking.project,
        episodes_every=tracking.episodes_every,
        episodes_per_step=tracking.episodes_per_step,
        config=flatten(config.stored()),
        ranks=ranks,
        console=config.output.console,
    )
    if ranks.is_first:
        if config.max_steps:
            tracker.note(f"{run.path}: {config.algorithm['name']} trains {config.model.path}")
        tracker.note(precision_of(config.model.autocast, setup.machine))
        for text in dict.fromkeys(warnings):
            tracker.warn(text)
        for text in dict.fromkeys(filter(None, notes)):
            tracker.note(text)
    return tracker


def precision_of(asked: str, machine: Machine) -> str:
    """Return the line that names the dtype of products, on a GPU or as model.autocast=auto chose it; else ""."""
    if not machine.on_gpu and asked != "auto":
        return ""
    chosen = asked == "auto" and machine.autocast == "bfloat16"
    reason = "which this machine multiplies faster" if chosen else f"model.autocast={asked}"
    untried = machine.device.partition(":")[0] not in devices.TRIED
    reason += f"; rl4llm was never tried on model.device={machine.device}" if untried else ""
    return f"computes in {machine.computed} with {machine.dtype} weights: {reason}"


def _trackers(config: Config) -> list[str]:
    names = ("tensorboard", "wandb", "opentelemetry", "prometheus")
    return [name for name in names if getattr(config.tracking, name)]
