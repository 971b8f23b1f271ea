"""What ``rl4llm info`` shows: versions, devices, and the registered names."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import platform
from collections.abc import Iterator

import torch
from rich.table import Table

from rl4llm import __version__
from rl4llm.algorithms import ALGORITHMS
from rl4llm.core.kernels import prefers_onednn
from rl4llm.core.registry import Registry
from rl4llm.envs import ENVIRONMENTS
from rl4llm.rewards import REWARDS

PACKAGES = ("torch", "transformers", "datasets", "omegaconf", "math-verify", "deepspeed", "sglang", "vllm", "wandb", "peft")


def tables(topic: str | None = None) -> Iterator[Table]:
    """The tables of one topic, or all of them."""
    if topic is None:
        yield _versions()
        yield _devices()
    if topic in (None, "algorithms"):
        yield _algorithms()
    if topic in (None, "environments"):
        yield _registered("environments (env.name)", ENVIRONMENTS)
    if topic in (None, "rewards"):
        yield _registered("rewards (rewards)", REWARDS)


def _versions() -> Table:
    table = Table("package", "version", title="versions")
    table.add_row("rl4llm", __version__)
    table.add_row("python", platform.python_version())
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        table.add_row(package, version)
    return table


def _devices() -> Table:
    table = Table("device", "what", title="devices")
    kernels = "oneDNN" if prefers_onednn() else "torch's default"
    table.add_row("cpu", f"{torch.get_num_threads()} threads, fp32 products by {kernels}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        table.add_row(f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return table


def _algorithms() -> Table:
    table = Table("name", "what", "needs", "options", title="algorithms (algorithm.name)")
    for name in ALGORITHMS:
        algorithm = ALGORITHMS[name]
        needs = [item.name for item in dataclasses.fields(algorithm().needs()) if getattr(algorithm().needs(), item.name)]
        options = ", ".join(f"{item.name}={item.default!r}" for item in dataclasses.fields(algorithm))
        table.add_row(name, _first_sentence(algorithm), ", ".join(needs) or "-", options)
    return table


def _registered(title: str, registry: Registry) -> Table:
    table = Table("name", "what", title=title)
    for name in registry:
        table.add_row(name, _first_sentence(registry[name]))
    return table


def _first_sentence(item: object) -> str:
    return (inspect.getdoc(item) or "").split("\n\n")[0].replace("\n", " ")
