"""Check names, options and combinations before a model is loaded, a server is asked or a process is started."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from rl4llm.backends.models import stored_config
from rl4llm.compose.engines import check_adapter_alone, check_engine, check_sync
from rl4llm.compose.environments import EnvKeys, check_env_options, weighed
from rl4llm.compose.models import check_backend
from rl4llm.compose.setup import Given, build_algorithm, demand_device, device_of
from rl4llm.config import Config, by_part
from rl4llm.config.keys import TrainingConfig
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.errors import ConfigError, RL4LLMError
from rl4llm.core.schema import check_values
from rl4llm.core.tables import GENERATED
from rl4llm.data.read import check_source
from rl4llm.envs import ENVIRONMENTS
from rl4llm.rewards import check_reward
from rl4llm.runs.run_dir import RunDir

T = TypeVar("T")


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
    for name, part in by_part(config).items():
        for source, split in ((part.data.path, part.data.split), (part.eval.path, part.eval.split)):
            if source is not None and source not in GENERATED:
                in_part(name, check_source, source, split)


def _misses_module(error: BaseException | None) -> bool:
    """Return whether the error is a missing module, which another machine may have."""
    return error is not None and (isinstance(error, ModuleNotFoundError) or _misses_module(error.__cause__))


def check_choices(config: Config, given: Given, needs: Needs) -> None:
    """Raise ConfigError for all mistakes that can be found without opening a file."""
    check_backend(config, needs)
    lora = config.model.lora
    for key, value in (("targets", list(lora.targets)), ("alpha", lora.alpha)):
        if value and not lora.rank:
            raise ConfigError(
                f"model.lora.{key}={value} has no effect without an adapter. Set model.lora.rank, such as 16, or remove it."
            )
    if config.model.lora.rank and config.model.vision == "train":
        raise ConfigError(
            f"model.vision=train cannot be combined with model.lora.rank={config.model.lora.rank}: an adapter trains "
            "only the text model. Set model.vision=frozen, or remove model.lora."
        )
    _check_mixture(config, given, needs.learns_from)
    for name, part in by_part(config).items():
        in_part(name, _check_slips, part)
        # Hosts have their own environments and rewards.
        hosted = part.env.get("remote") or config.launch.env_hosts
        in_part(name, *((check_values, "env", EnvKeys, part.env) if hosted else (_check_part, part, given)))
    check_sync(config)
    check_engine(config)
    if "lora" in (config.sync.name, config.sync.fallback):
        check_adapter_alone(config)
    _check_temperature(config, needs)
    _check_updates(config, needs)


def _check_updates(config: Config, needs: Needs) -> None:
    """Raise ConfigError for numbers that make no optimizer steps of a rollout."""
    updates, prompts = config.training.updates_per_rollout, config.rollout.prompts
    if needs.learns_from != "episodes":
        return
    if updates > prompts:
        raise ConfigError(
            f"training.updates_per_rollout={updates} is not accepted. Use at most one per prompt ({prompts})."
        )
    if config.training.epochs is not None and config.max_steps:
        raise ConfigError(
            f"training.epochs={config.training.epochs:g} counts passes over a dataset, but algorithm.name="
            f"{config.algorithm['name']!r} samples. Did you mean training.passes_per_rollout, the passes over the samples "
            "of a step, or max_steps?"
        )


def warnings_of(config: Config) -> list[str]:
    """Return warnings about choices that are accepted."""
    return [*rate_warnings(config), *_escapes(config)]


def _escapes(config: Config) -> list[str]:
    r"""Return warnings about texts of one line with a ``\n`` that a shell or single quotes kept, and that is not of TeX."""
    return [
        f"{f'parts.{part}.' if part else ''}data.{key} has a backslash and an n, which the policy reads as such. For a line "
        f"break put double quotes around the text, as in 'data.{key}=\"Question:\\nAnswer:\"'."
        for part, own in by_part(config).items()
        for key in ("system_prompt", "prompt_template")
        if "\n" not in (text := getattr(own.data, key) or "") and re.search(r"(?<!['\"`])\\n(?![a-z])", text)
    ]


def rate_warnings(config: Config) -> list[str]:
    """Return a warning if the learning rate is the default, or never gets through its warm-up.

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
    if "training.lr" in config.given or lr != TrainingConfig.lr:
        return []
    fits = "for models of 1.5 billion parameters and more. Set training.lr=1e-5 for smaller ones, or 1e-4 for tiny ones"
    if config.model.lora.rank:
        fits = "for all weights of a large model, and an adapter hardly learns with it. Set training.lr=1e-5 or more"
    return [f"training.lr is not set. Its default {lr:g} is a rate {fits}; training.lr={lr:g} keeps it."]


def nobody_starts(config: Config, ranks: int) -> str:
    """Return a warning if the section `launch` asks for processes that this trainer of `ranks` does not have; "" if not."""
    remote = [
        config.env.get("remote"),
        *(part.get("env", {}).get("remote") for part in config.parts.values()),
    ]
    asked = {
        "servers": config.launch.servers if not config.inference.get("url") else 0,
        "env_hosts": config.launch.env_hosts if not any(remote) else 0,
        "nproc": config.launch.nproc if ranks == 1 and config.launch.nproc > 1 else 0,
    }
    missed = ", ".join(f"launch.{name}={count}" for name, count in asked.items() if count)
    return (
        f"{missed} has no effect here: only `rl4llm launch CONFIG` starts these processes, with --on LAUNCHER all of them."
        if missed
        else ""
    )


def in_part(name: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function and return its result; name the part in its error."""
    try:
        return function(*args)
    except RL4LLMError as error:
        if not name:
            raise
        raise type(error)(f"parts.{name}: {error}") from error


def _check_slips(part: Config) -> None:
    """Raise ConfigError for a stop that no user means as it is: an empty one, or an escape sequence."""
    for stop in part.rollout.stop:
        if not stop or re.fullmatch(r"(\\[nrt])+", stop):
            what = "is a backslash and a letter" if stop else "ends each turn at once"
            mend = "for a line break write 'rollout.stop=[\"\\n\"]'" if stop else "remove it"
            raise ConfigError(f"rollout.stop: {stop!r} {what}. Next: {mend}.")


def _check_part(part: Config, given: Given) -> None:
    """Raise ConfigError for an option that the environment or a reward of a part does not accept."""
    check_env_options(given.env_class or ENVIRONMENTS[part.env["name"]], part.env)
    for item in part.rewards or () if given.reward_functions is None else ():
        check_reward(weighed(item)[0])


def _check_temperature(config: Config, needs: Needs) -> None:
    """Raise ConfigError if answers that are compared with each other cannot differ."""
    if config.rollout.temperature > 0 or needs.learns_from != "episodes" or not config.max_steps:
        return
    drawn_apart = any(rung.get("temperature", 0.0) > 0 for rung in needs.sampling)
    if (needs.group and not drawn_apart) or needs.greedy_baseline:
        others = "the most probable answer" if needs.greedy_baseline else "each other"
        raise ConfigError(
            f"rollout.temperature=0 is not accepted with algorithm.name={config.algorithm['name']!r}: the answers to a "
            f"prompt are compared with {others}. At temperature 0 they are all the same, so nothing is learned. Set "
            "rollout.temperature above 0, e.g. to 1.0. For evaluation set eval.temperature."
        )


def _check_mixture(config: Config, given: Given, learns_from: str) -> None:
    """Raise ConfigError for what cannot be combined with several environments."""
    if not config.parts:
        return
    if learns_from != "episodes":
        name = config.algorithm["name"]
        raise ConfigError(
            f"parts are environments, but algorithm.name={name!r} learns from {learns_from}. Remove parts."
        )
    for what in ("dataset", "eval_dataset", "reward_functions", "env_class"):
        if getattr(given, what) is not None:
            raise ConfigError(
                f"{what.removesuffix('_class')} cannot be combined with parts. Set it inside each part."
            )
