"""What ``rl4llm info`` shows: versions, devices, and the registered names."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import platform
from collections.abc import Iterator
from typing import Any

import torch
from rich.table import Table

import rl4llm.build  # noqa: F401 - registers what needs a model too
from rl4llm import __version__
from rl4llm.algorithms import ALGORITHMS
from rl4llm.algorithms.policy_gradient import PolicyGradient
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.kernels import prefers_onednn
from rl4llm.core.registry import Registry
from rl4llm.envs import ENVIRONMENTS
from rl4llm.rewards import REWARDS

PACKAGES = (
    "torch", "transformers", "datasets", "omegaconf", "math-verify", "deepspeed", "sglang", "vllm", "peft", "wandb",
    "mlflow-skinny", "trackio",
)  # fmt: skip


def tables(topic: str | None = None) -> Iterator[Table]:
    """The tables of one topic, or all of them."""
    if topic is None:
        yield _versions()
        yield _devices()
    if topic in (None, "algorithms"):
        yield from _algorithms()
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


def _algorithms() -> Iterator[Table]:
    """Every method with what is its own, then what all policy-gradient methods have."""
    shared = _options(PolicyGradient)
    table = Table("name", "what", "needs", "options of its own, and other defaults", title="algorithms (algorithm.name)")
    for name in ALGORITHMS:
        algorithm = ALGORITHMS[name]
        own = {key: value for key, value in _options(algorithm).items() if shared.get(key, object) != value}
        table.add_row(name, _first_sentence(algorithm), ", ".join(_needs(algorithm)) or "-", _shown(own))
    yield table
    table = Table("option", "default", title="options of every policy-gradient method")
    for key, value in shared.items():
        table.add_row(key, repr(value))
    yield table


def _options(algorithm: type) -> dict[str, Any]:
    """Names and defaults."""
    return {
        item.name: item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        for item in dataclasses.fields(algorithm)
        if item.init
    }


def _needs(algorithm: type) -> Iterator[str]:
    """What differs from an algorithm that needs nothing, as its default options are."""
    nothing, needs = Needs(every_token=False), algorithm().needs()
    for item in dataclasses.fields(Needs):
        value = getattr(needs, item.name)
        if value != getattr(nothing, item.name):
            yield item.name if value is True or item.name in ("critic", "sampling") else f"{item.name}={value}"


def _shown(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


def _registered(title: str, registry: Registry) -> Table:
    table = Table("name", "what", title=title)
    for name in registry:
        table.add_row(name, _first_sentence(registry[name]))
    return table


def _first_sentence(item: object) -> str:
    return (inspect.getdoc(item) or "").split("\n\n")[0].replace("\n", " ")
