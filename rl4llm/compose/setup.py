"""What a run is made of: its configuration, the objects given, and the facts of this machine, which are resolved once.

Its identity is the keys and objects that a resumed run must not change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash

from rl4llm.algorithms import ALGORITHMS
from rl4llm.compose.identity import Identity
from rl4llm.config import Config, flatten
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import ConfigError, RL4LLMError, RunDirError
from rl4llm.core.model_memory import Precision
from rl4llm.core.redact import HIDDEN
from rl4llm.core.schema import with_options
from rl4llm.envs import ENVIRONMENTS
from rl4llm.runs.run_dir import RunDir
from rl4llm.runtime import devices
from rl4llm.runtime.cpu import keep_freed_memory, multiplies_bfloat16
from rl4llm.runtime.gpus import ALLOCATOR
from rl4llm.runtime.ranks import Ranks, join_ranks

MAY_CHANGE = (
    "max_steps", "threads", "timeout_s", "backend.", "eval.", "checkpoint.", "tracking.", "output.", "inference.", "sync.",
    "mismatch.", "training.epochs", "rollout.max_failed_share", "training.max_skipped", "sandbox.", "env.remote", "launch.",
)  # fmt: skip
"""Keys that a resumed run may change without becoming another run."""


@dataclass(frozen=True, slots=True)
class Given:
    """Objects that the Python API gives instead of names; for None the configuration decides."""

    model: Any = None
    tokenizer: Any = None
    dataset: Any = None
    eval_dataset: Any = None
    reward_functions: Sequence[Any] | None = None
    reward_transform_fn: Any = None
    env_class: type[BaseMDPEnv] | None = None
    hosted: Any = None  # the stand-in for an environment that hosts run


@dataclass(frozen=True, slots=True)
class Machine:
    """What a process computes with: the device of its models, their dtype and that of products, and the other ranks."""

    device: str  # cpu, or the type of an accelerator, with a number or without
    dtype: str
    autocast: str  # none is the dtype of the weights
    ranks: Ranks

    @classmethod
    def of(cls, config: Config, ranks: Ranks | None = None) -> Machine:
        """Resolve what the configuration leaves to the machine; a single process by default."""
        return cls(device_of(config), config.model.dtype, autocast_of(config), ranks or Ranks())

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def computed(self) -> str:
        """Return the dtype of the trainer's matrix products."""
        return self.dtype if self.autocast == "none" else self.autocast

    @property
    def precision(self) -> Precision:
        return Precision.of(self.dtype, self.autocast, gpu=self.on_gpu)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run is made of, or one of its `parts`, whose configuration it then has."""

    config: Config
    given: Given
    machine: Machine
    algorithm: BaseAlgorithm
    tokenizer: Any = None
    identity: Identity = field(default_factory=Identity)

    @classmethod
    def of(
        cls, config: Config, given: Given | None = None, tokenizer: Any = None, machine: Machine | None = None
    ) -> Setup:
        """Make the algorithm, and by default join the ranks that train together."""
        config = with_stale_options(config)
        machine = machine or Machine.of(config, join_ranks(config.timeout_s))
        identity = Identity(first=machine.ranks.is_first)
        return cls(config, given or Given(), machine, build_algorithm(config), tokenizer, identity)

    @property
    def needs(self) -> Needs:
        return self.algorithm.needs()

    @property
    def env_class(self) -> type[BaseMDPEnv]:
        """Return the class of the environment: the one given, that of `env.name`, or the stand-in if hosts run it."""
        return self.given.hosted or self.given.env_class or ENVIRONMENTS[self.config.env["name"]]


def with_stale_options(config: Config) -> Config:
    """Return the configuration with the options that its algorithm takes for samples of older weights, if there are any."""
    if not _older(config):
        return config
    options = ALGORITHMS[config.algorithm["name"]].stale_options(config.algorithm)
    return replace(config, algorithm=options | config.algorithm)


def stale_note(config: Config) -> str:
    """Return the line that names the options for samples of older weights; "" if there are none."""
    cause, options = _older(config), config.algorithm
    names = ALGORITHMS[options["name"]].stale_options({}) if cause else ()
    used = ", ".join(f"algorithm.{name}={options[name]}" for name in names if name in options)
    return f"{cause}: older samples train with {used}" if used else ""


def _older(config: Config) -> str:
    """Return the key by which samples of older weights train; "" if none do."""
    stale, replay = config.rollout.max_staleness, config.rollout.replay
    return f"rollout.max_staleness={stale}" if stale else f"rollout.replay={replay}" if replay else ""


def build_algorithm(config: Config) -> BaseAlgorithm:
    """Make the algorithm with its options; raise ConfigError for unknown or impossible ones."""
    options = dict(with_stale_options(config).algorithm)
    algorithm = with_options("algorithm", ALGORITHMS[options.pop("name")], options)
    algorithm.check(config.rollout.group_size)
    return algorithm


def set_up_torch(config: Config, machine: Machine) -> None:
    """Set threads, determinism and seed of this process, before a model is made."""
    demand_device(machine.device)
    if not machine.on_gpu:
        keep_freed_memory()
        # Without it DeepSpeed guesses the accelerator and prints its guess.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    else:
        _set_up_gpu(config, torch.device(machine.device))
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(config.deterministic)
    torch.manual_seed(config.seed)


def _set_up_gpu(config: Config, device: torch.device) -> None:
    """Set the kernels and the allocator of a GPU; prepare cuBLAS for the deterministic mode.

    A device with a number becomes the current one, for calls that name none.
    """
    devices.use_exact_kernels()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    if not os.environ.keys() & ALLOCATOR:  # what a user has set stays
        # Batches have other shapes in each step, which would fragment the memory. Set here and not in the environment, which
        # servers inherit.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if device.index is not None:
        devices.call(device, "set_device", device)


def device_of(config: Config) -> str:
    """Return the device of the models; "auto" uses a GPU if there is one."""
    return devices.default() if config.model.device == "auto" else config.model.device


def autocast_of(config: Config) -> str:
    """Return the dtype of matrix products, "none" for that of the weights; "auto" is bfloat16 where it is faster.

    A GPU that only a plan knows multiplies in bfloat16.
    """
    if config.model.autocast != "auto":
        return config.model.autocast
    device = device_of(config)
    if device == "cpu":
        faster = multiplies_bfloat16()
    else:  # without emulation
        faster = not devices.call(device, "is_available") or devices.call(device, "is_bf16_supported", False)
    return "bfloat16" if faster and config.model.dtype == "float32" else "none"


def demand_device(name: str) -> None:
    """Raise ConfigError for a device that this machine does not have."""
    if name not in (found := ["cpu", *devices.names()]) and name != devices.accelerator():
        raise ConfigError(
            f"model.device={name!r} is not available: torch {torch.__version__} finds {', '.join(found)}. "
            "Use model.device=auto; `rl4llm plan --device-memory` plans for another machine."
        )


def planned_run(setup: Setup, dataset: Any, force: bool) -> RunDir:
    """Plan the run's directory, which the first rank will lock; raise on every rank if this run cannot use it."""
    config, ranks = setup.config, setup.machine.ranks
    if not ranks.is_first:
        return held(setup, RunDir(config.output.dir))

    def plan() -> RunDir:
        fixed, changeable = fixed_and_changeable(config)
        identity = fixed | {"rollout.prompts": config.rollout.prompts * ranks.size}  # of all ranks
        identity["model.autocast"] = setup.machine.autocast  # another machine must not change it
        # Hashes of the environment variables that the configuration reads, except those of secrets.
        public = [name for name, secret in config.variables().items() if not secret]
        variables = {
            f"environment.{name}": xxhash.xxh32_hexdigest(os.environ.get(name, "").encode())
            for name in public
        }
        run = RunDir.planned(
            config.output.dir,
            identity | given_identity(setup.given, dataset),
            settings={"processes": ranks.size} | changeable | variables,
            defaults=flatten(Config().values()) | variables,
            allow_changes=force,
        )
        run.keep("config.yaml", config.to_yaml(), private=True)
        run.hold(setup.identity.contents)
        return run

    return _agreed(setup, plan)


def held(setup: Setup, run: RunDir) -> RunDir:
    """Return a run whose keys name what they named in its earlier starts; raise on every rank if they do not."""

    def hold() -> RunDir:
        if setup.machine.ranks.is_first:
            run.hold(setup.identity.contents)
        return run

    return _agreed(setup, hold)


def _agreed(setup: Setup, work: Callable[[], RunDir]) -> RunDir:
    refused = RunDirError(f"{setup.config.output.dir} cannot be used. See the error of rank 0.")
    return setup.machine.ranks.agree(work, (RL4LLMError,), refused)


def refuse_hidden(config: Config) -> None:
    """Raise ConfigError if a secret was removed from the configuration when a run wrote it."""
    for key, value in flatten(config.values()).items():
        if HIDDEN in str(value) and not key.startswith("launch."):
            raise ConfigError(
                f"{key} is {HIDDEN!r}, since a run writes no secrets. Set it again, as to ${{oc.env:NAME}}, or use the file "
                "that the run was started with."
            )


def fixed_and_changeable(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys that a resumed run must not change, and every other one except output.dir, with their values."""
    fixed: dict[str, Any] = {}
    changeable: dict[str, Any] = {}
    for key, value in flatten(config.stored()).items():
        name = key.split(".", 2)[-1] if key.startswith("parts.") else key
        (changeable if name.startswith(MAY_CHANGE) else fixed)[key] = value
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
