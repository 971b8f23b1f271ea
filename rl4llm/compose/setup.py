"""What a run is made of: its configuration, the objects given, and the facts of this machine, which are resolved once."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch

from rl4llm.algorithms import ALGORITHMS
from rl4llm.compose.tables import Given
from rl4llm.config import Config
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import with_options
from rl4llm.envs import ENVIRONMENTS
from rl4llm.runtime.cpu import keep_freed_memory, multiplies_bfloat16
from rl4llm.runtime.ranks import Ranks, join_ranks

ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}  # what a user has set stays


@dataclass(frozen=True, slots=True)
class Machine:
    """What a process computes with: the device of its models, their dtype and that of products, and the other ranks."""

    device: str  # cpu, cuda or cuda:1
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


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run is made of, or one of its `parts`, whose configuration it then has."""

    config: Config
    given: Given
    machine: Machine
    algorithm: BaseAlgorithm
    tokenizer: Any = None

    @classmethod
    def of(
        cls, config: Config, given: Given | None = None, tokenizer: Any = None, machine: Machine | None = None
    ) -> Setup:
        """Make the algorithm, and by default join the ranks that train together."""
        machine = machine or Machine.of(config, join_ranks(config.timeout_s))
        return cls(config, given or Given(), machine, build_algorithm(config), tokenizer)

    @property
    def needs(self) -> Needs:
        return self.algorithm.needs()

    @property
    def env_class(self) -> type[BaseMDPEnv]:
        """Return the class of the environment: the one given, that of `env.name`, or the stand-in if hosts run it."""
        return self.given.hosted or self.given.env_class or ENVIRONMENTS[self.config.env["name"]]


def build_algorithm(config: Config) -> BaseAlgorithm:
    """Make the algorithm with its options; raise ConfigError for unknown or impossible ones."""
    options = dict(config.algorithm)
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
    from rl4llm.runtime.gpus import use_exact_kernels  # noqa: PLC0415 - only on a GPU

    use_exact_kernels()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    if "tensor" not in (config.sync.name, config.sync.fallback) and not ALLOCATOR & os.environ.keys():
        # Batches have other shapes in each step, which would fragment the memory. Set here and not in the environment, which
        # servers inherit; and not for CUDA IPC, since importing such memory takes the right to trace this process.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if device.index is not None:
        torch.cuda.set_device(device)


def device_of(config: Config) -> str:
    """Return the device of the models; "auto" uses a GPU if there is one."""
    if config.model.device != "auto":
        if not re.fullmatch(r"cpu|cuda(:\d+)?", config.model.device):
            raise ConfigError(
                f"model.device={config.model.device!r} is not accepted. Accepted: auto, cpu, cuda or cuda:1."
            )
        return config.model.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def autocast_of(config: Config) -> str:
    """Return the dtype of matrix products, "none" for that of the weights; "auto" is bfloat16 where it is faster.

    A GPU that only a plan knows multiplies in bfloat16.
    """
    if config.model.autocast != "auto":
        return config.model.autocast
    planned = not torch.cuda.is_available()
    faster = (
        multiplies_bfloat16()
        if device_of(config) == "cpu"
        else planned or torch.cuda.is_bf16_supported(including_emulation=False)
    )
    return "bfloat16" if faster and config.model.dtype == "float32" else "none"


def demand_device(name: str) -> None:
    """Raise ConfigError for a GPU that this machine does not have."""
    device, gpus = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ConfigError(
            f"model.device={name!r} is not available: torch {torch.__version__} finds {gpus} GPU(s). Next: use "
            "model.device=auto, or install a CUDA build of torch. To plan for another machine, use "
            "`rl4llm plan --device-memory`."
        )
