"""The identity of a run: the keys that a resumed run must not change, and those that it may."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import xxhash

from rl4llm.compose.setup import Machine
from rl4llm.compose.tables import Given
from rl4llm.config import Config, LaunchConfig, as_written, flatten, to_yaml, variables_of
from rl4llm.core.errors import ConfigError, RL4LLMError, RunDirError
from rl4llm.core.redact import HIDDEN, redacted
from rl4llm.runs.run_dir import RunDir

MAY_CHANGE = (
    "max_steps", "threads", "timeout_s", "backend.", "eval.", "checkpoint.", "tracking.", "output.", "inference.", "sync.",
    "mismatch.", "rollout.max_failed_share", "training.max_skipped", "sandbox.", "env.remote", "launch.",
)  # fmt: skip
"""Keys that a resumed run may change without becoming another run."""


def planned_run(config: Config, machine: Machine, given_identity: Mapping[str, Any], force: bool) -> RunDir:
    """Plan the run's directory, which the first rank will lock; raise on every rank if this run cannot use it."""
    ranks, problem = machine.ranks, None
    run = RunDir(config.output.dir)
    if ranks.is_first:
        fixed, changeable = fixed_and_changeable(config)
        identity = fixed | {"rollout.prompts": config.rollout.prompts * ranks.size}  # of all ranks
        identity["model.autocast"] = machine.autocast  # another machine must not change it
        # Hashes of the environment variables that the configuration reads, except those of secrets.
        read = {name: os.environ.get(name, "") for name, secret in variables_of(config).items() if not secret}
        variables = {f"environment.{name}": xxhash.xxh32_hexdigest(read[name].encode()) for name in read}
        settings = {"processes": ranks.size} | changeable | variables
        try:
            identity |= given_identity
            run = RunDir.planned(
                config.output.dir,
                identity,
                settings=settings,
                defaults=flatten(Config()) | variables,
                resolved=flatten(redacted(config)),
                allow_changes=force,
            )
            run.keep("config.yaml", to_yaml(config), private=True)
        except RL4LLMError as error:
            problem = error
    if ranks.share(problem is not None):
        raise problem or RunDirError(f"{config.output.dir} cannot be used. See the error of rank 0.")
    return run


def refuse_hidden(config: Config) -> None:
    """Raise ConfigError if a secret was removed from the configuration when a run wrote it."""
    for key, value in flatten(replace(config, launch=LaunchConfig())).items():
        if HIDDEN in str(value):
            raise ConfigError(
                f"{key} is {HIDDEN!r}: a run does not write secrets into its directory. Next: use the file that the run was "
                "started with, or set the key to another value, such as ${oc.env:NAME}."
            )


def fixed_and_changeable(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys that a resumed run must not change, and every other one except output.dir, with their values."""
    fixed: dict[str, Any] = {}
    changeable: dict[str, Any] = {}
    for key, value in flatten(as_written(config)).items():
        own = key.split(".", 2)[-1] if key.startswith("parts.") else key
        (changeable if own.startswith(MAY_CHANGE) else fixed)[key] = value
    del changeable["output.dir"]
    return fixed, changeable


def given_identity(given: Given, dataset: Any) -> dict[str, Any]:
    """Return the identity of the Python objects given, since the configuration names only their types."""
    identity: dict[str, Any] = {}
    if given.dataset is not None:
        text = "\n".join(str(row.get("prompt_id", row)) for row in dataset)
        identity["given.dataset"] = f"{len(dataset)} rows, {xxhash.xxh3_64_hexdigest(text.encode())}"
    if given.model is not None:
        identity["given.model"] = f"{type(given.model).__name__}, {given.model.num_parameters():,} parameters"
    if given.reward_functions is not None:
        names = [
            getattr(item, "__qualname__", None) or type(item).__qualname__ for item in given.reward_functions
        ]
        identity["given.reward_functions"] = names
    if given.env_class is not None:
        identity["given.env"] = given.env_class.__qualname__
    return identity
