"""Check names, options and combinations before a model is loaded, a server is asked or a process is started."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from rl4llm.backends.models import stored_config
from rl4llm.compose.engines import check_engine, over_another_base
from rl4llm.compose.environments import EnvKeys, check_env_options, weighed
from rl4llm.compose.models import check_backend
from rl4llm.compose.setup import Given, build_algorithm, demand_device, device_of
from rl4llm.config import Config
from rl4llm.config.keys import TrainingConfig
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.errors import ConfigError, RL4LLMError
from rl4llm.core.schema import check_values
from rl4llm.core.tables import ENGINES, GENERATED, PUBLISHERS
from rl4llm.data.read import check_source
from rl4llm.envs import ENVIRONMENTS
from rl4llm.rewards import check_reward
from rl4llm.runs.run_dir import RunDir

T = TypeVar("T")
ROUNDED = 1e-9  # Adam's steps are about the learning rate, and half the distance of float32 numbers near 0.02 is 9e-10


def check_config(config: Config, *, here: bool) -> None:
    """Check a configuration that other processes will train with; raise an RL4LLMError if it is wrong.

    Args:
        config: the configuration.
        here: whether they run on this machine, so that files, devices and modules can be checked too.
    """
    try:
        check_choices(config, Given(), build_algorithm(config).needs())
    except ConfigError as error:
        if here or not _misses_module(error):
            raise
    if not here:
        return
    RunDir(config.output.dir).check()
    demand_device(device_of(config))
    stored_config(config.model.path)
    for name, part in config.environments.items():
        for source, split in ((part.data.path, part.data.split), (part.eval.path, part.eval.split)):
            if source is not None and source not in GENERATED:
                in_part(name, check_source, source, split)


def _misses_module(error: BaseException | None) -> bool:
    """Return whether the error is a missing module, which another machine may have."""
    return error is not None and (isinstance(error, ModuleNotFoundError) or _misses_module(error.__cause__))


def check_choices(config: Config, given: Given, needs: Needs) -> None:
    """Raise ConfigError for all mistakes that can be found without opening a file."""
    check_backend(config, needs)
    check_engine(config)
    for text, holds in _conflicts(config, given, needs).items():
        if holds:
            raise ConfigError(text)
    for name, part in config.environments.items():
        # Hosts have their own environments and rewards.
        hosted = part.env.get("remote") or config.launch.env_hosts
        in_part(name, *((check_values, "env", EnvKeys, part.env) if hosted else (_check_part, part, given)))


def _conflicts(config: Config, given: Given, needs: Needs) -> dict[str, Any]:
    """Return messages about keys that cannot be combined, each with whether it holds; in silence they would change a run."""
    algorithm = f"algorithm.name={config.algorithm['name']!r}"
    inference = f"inference.name={config.inference['name']!r}"
    engine, cohost = ENGINES[config.inference["name"]], config.inference.get("cohost")
    lora, vision, sync = config.model.lora, config.model.vision, config.sync
    rollout, training = config.rollout, config.training
    ways, router = {sync.name, sync.fallback or "auto"} - {"auto"}, config.inference.get("router")
    for way in ways:
        PUBLISHERS[way]  # answers an unknown name
    samples = needs.learns_from == "episodes"
    # Answers that are compared with each other, or with the most probable one, are all the same at temperature 0.
    drawn_apart = any(rung.get("temperature", 0.0) > 0 for rung in needs.sampling)
    compared = (needs.group and not drawn_apart) or needs.greedy_baseline
    of_episodes = given.reward_functions, given.env_class, config.curriculum
    objects = given.reward_functions, given.env_class, given.dataset, given.eval_dataset
    return {
        "model.lora.targets and model.lora.alpha have no effect without an adapter. Set model.lora.rank, such as 16, or "
        "remove them.": not lora.rank and (lora.targets or lora.alpha),
        "model.quantize=nf4 freezes the model. Set model.lora.rank, such as 16, or remove model.quantize.": (
            config.model.quantize != "none" and not lora.rank
        ),
        "model.vision=train cannot be combined with model.lora, which trains only text. Set model.vision=frozen.": (
            lora.rank and vision == "train"
        ),
        f"model.vision={vision} is not accepted with {inference}, which takes no images.": (
            vision != "none" and not engine.takes_images
        ),
        f"parts are environments, but {algorithm} learns from {needs.learns_from}. Remove parts.": (
            config.parts and not samples
        ),
        "Objects of Python (dataset, reward_functions, env) cannot be combined with parts. Name them inside each part.": (
            config.parts and any(item is not None for item in objects)
        ),
        f"{algorithm} averages weights, which model.dtype={config.model.dtype} rounds away. Set model.dtype=float32, or "
        "another teacher.": needs.reference_rate < 1 and config.model.dtype != "float32",
        "rollout.temperature must be 1 with algorithm.teacher_url, since servers score tokens at temperature 1.": (
            needs.served and rollout.temperature != 1
        ),
        f"model.vision={vision} is not accepted with algorithm.teacher_url, since servers score text alone. Set "
        "algorithm.teacher_path.": needs.reference_url and not needs.references and vision != "none",
        f"algorithm.teachers names {sorted(needs.references)}, but parts are {sorted(config.parts)}. Name parts, and set "
        "algorithm.teacher_path for those without a teacher.": needs.references
        and (
            not needs.references.keys() <= config.parts.keys()
            or (needs.reference_path is needs.reference_url and needs.references.keys() != config.parts.keys())
        ),
        f"rollout.temperature=0 is not accepted with {algorithm}, which compares the answers to a prompt: they would all be "
        "the same. Set rollout.temperature above 0; for evaluation set eval.temperature.": (
            samples and compared and not rollout.temperature and config.max_steps
        ),
        f"training.updates_per_rollout={training.updates_per_rollout} is not accepted. Use at most one per prompt "
        f"({rollout.prompts}).": samples and training.updates_per_rollout > rollout.prompts,
        f"training.epochs counts passes over a dataset, but {algorithm} samples. Did you mean training.passes_per_rollout, "
        "the passes over the samples of a step, or max_steps?": (
            samples and training.epochs is not None and config.max_steps
        ),
        "training.passes_per_rollout repeats the samples of a rollout, and a dataset has none. Set training.epochs.": (
            not samples and training.passes_per_rollout > 1
        ),
        f"reward_functions, env and curriculum are not accepted with {algorithm}, which samples nothing and learns from "
        f"{needs.learns_from}. Remove them.": not samples and any(item is not None for item in of_episodes),
        f"rollout.prompts=1 is not accepted with {algorithm}, which pairs answers with other prompts of a step. Use 2 or "
        "more.": needs.mismatched and rollout.prompts < 2,
        f"sync={' and '.join(sorted(ways))} is not accepted with {inference}. Accepted: {', '.join(engine.publishers)}.": (
            not ways <= set(engine.publishers)
        ),
        "sync.name=lora needs model.lora.rank above 0, no inference.router, which does not know of adapters, and no "
        "sync.fallback, whose merged weights under an adapter would count twice.": (
            "lora" in ways and (not lora.rank or router or sync.fallback)
        ),
        "inference.cohost=true publishes through files. Remove sync.name and sync.fallback.": (
            cohost and (ways - {"filesystem"} or sync.fallback)
        ),
        "inference.cohost=true cannot be combined with inference.router: its health checks make sleeping servers generate. "
        "Remove inference.router (and launch.router).": cohost and router,
        f"rollout.max_staleness={rollout.max_staleness} needs servers on separate devices, not {inference} or "
        "inference.cohost. `rl4llm info` lists engines.": rollout.max_staleness and (cohost or not engine.is_server),
        f"rollout.replay={rollout.replay} is not accepted with {algorithm}, which also learns from groups of "
        "equal rewards. Set it to 0.": samples and rollout.replay and (not needs.group or needs.privileged),
        f"model.vision=train with {inference} is not accepted beside rollout.max_staleness or inference.router: servers "
        "keep features of images that an earlier version made. Set model.vision=frozen.": (
            vision == "train" and engine.keeps_features and (rollout.max_staleness or router)
        ),
    }  # fmt: skip


def warnings_of(config: Config) -> list[str]:
    """Return warnings about choices that are accepted."""
    return [*rate_warnings(config), *_escapes(config), *_base_warnings(config)]


def _base_warnings(config: Config) -> list[str]:
    corrected = config.algorithm.get("correction") is not None
    return [
        "The servers' base may have more bits than the trainer's; mismatch/canary measures it at each weight sync. Set "
        "algorithm.correction=tis, or start them with the same 4 bits (vLLM: --quantization bitsandbytes)."
    ] * (over_another_base(config) and not corrected)


def _escapes(config: Config) -> list[str]:
    r"""Return warnings about texts with a ``\n`` that a shell or single quotes kept, and that is not of TeX."""
    texts = {
        f"{f'parts.{name}.' if name else ''}{key}": text
        for name, part in config.environments.items()
        for key, text in {
            "data.system_prompt": part.data.system_prompt or "",
            "data.prompt_template": part.data.prompt_template or "",
            "rollout.stop": "".join(part.rollout.stop),
        }.items()
    }
    return [
        f"{key} has a backslash and an n, which is no line break. For one put double quotes around the text, as in "
        f"'{key}=\"Question:\\nAnswer:\"'."
        for key, text in texts.items()
        if "\n" not in text and re.search(r"(?<!['\"`])\\n(?![a-z])", text)
    ]


def rate_warnings(config: Config) -> list[str]:
    """Return a warning if the learning rate is the default, never gets through its warm-up, or is rounded away.

    >>> from rl4llm.config import load_config
    >>> rate_warnings(load_config(overrides={"model.path": "m", "training.lr": 1e-6}))
    []
    """
    training, lr = config.training, config.training.lr
    steps = config.max_steps * training.updates_per_rollout * training.passes_per_rollout
    if 0 < steps < training.warmup_steps:
        return [
            f"training.warmup_steps={training.warmup_steps} is more than the {steps} optimizer steps of the run, so it ends "
            f"at {steps / training.warmup_steps:.0%} of training.lr={lr:g}. Set it lower."
        ]
    if 0 < lr < ROUNDED:
        return [
            f"training.lr={lr:g} is rounded away: float32 weights of the usual size, 0.02, are 2e-9 apart. Raise it."
        ]
    if "training.lr" in config.origin.keys or lr != TrainingConfig.lr:
        return []
    fits = "for models of 1.5 billion parameters and more. Set training.lr=1e-5 for smaller ones, or 1e-4 for tiny ones"
    if config.model.lora.rank:
        fits = "for all weights of a large model, and an adapter hardly learns with it. Set training.lr=1e-5 or more"
    return [f"training.lr is not set. Its default {lr:g} is a rate {fits}; training.lr={lr:g} keeps it."]


def nobody_starts(config: Config, ranks: int) -> str:
    """Return a warning if the section `launch` asks for processes that this trainer of `ranks` does not have; "" if not."""
    launch = config.launch
    remote = any(part.env.get("remote") for part in config.environments.values())
    unstarted = {
        "servers": 0 if config.inference.get("url") else launch.servers,
        "env_hosts": 0 if remote else launch.env_hosts,
        "nproc": launch.nproc if ranks == 1 < launch.nproc else 0,
    }
    keys = ", ".join(f"launch.{name}={count}" for name, count in unstarted.items() if count)
    return keys and f"{keys} has no effect here: only `rl4llm launch CONFIG` starts these processes."


def in_part(name: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function and return its result; name the part in its error."""
    try:
        return function(*args)
    except RL4LLMError as error:
        if not name:
            raise
        raise type(error)(f"parts.{name}: {error}") from error


def _check_part(part: Config, given: Given) -> None:
    """Raise ConfigError for an option that the environment or a reward of a part does not accept."""
    check_env_options(given.env_class or ENVIRONMENTS[part.env["name"]], part.env)
    for item in part.rewards or () if given.reward_functions is None else ():
        check_reward(weighed(item)[0])
