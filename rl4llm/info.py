"""What ``rl4llm info`` shows: versions, devices, and the registered names."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import platform
from collections.abc import Iterator
from typing import Any

import torch

import rl4llm.build  # noqa: F401 - registers what needs a model too
from rl4llm import __version__
from rl4llm.algorithms import ALGORITHMS
from rl4llm.algorithms.policy_gradient import PolicyGradient
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.kernels import prefers_onednn
from rl4llm.core.registry import Registry
from rl4llm.envs import ENVIRONMENTS
from rl4llm.rewards import REWARDS
from rl4llm.tables import Facts

PACKAGES = (
    "torch", "transformers", "datasets", "omegaconf", "math-verify", "deepspeed", "sglang", "vllm", "peft", "wandb",
    "mlflow-skinny", "trackio",
)  # fmt: skip


def facts(topic: str | None = None) -> Iterator[Facts]:
    """What there is of one topic, or of all of them."""
    if topic is None:
        yield _versions()
        yield _devices()
    if topic in (None, "algorithms"):
        yield from _algorithms()
    if topic in (None, "environments"):
        yield _registered("environments", "env.name", ENVIRONMENTS)
    if topic in (None, "rewards"):
        yield _registered("rewards", "rewards", REWARDS)


def _versions() -> Facts:
    rows = [("rl4llm", __version__), ("python", platform.python_version())]
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        rows.append((package, version))
    return Facts("versions", "versions", ("package", "version"), rows)


def _devices() -> Facts:
    kernels = "oneDNN" if prefers_onednn() else "torch's default"
    rows = [("cpu", f"{torch.get_num_threads()} threads, fp32 products by {kernels}")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    return Facts("devices", "devices", ("device", "what"), rows)


def _algorithms() -> Iterator[Facts]:
    """Every method with what is its own, then what all policy-gradient methods have."""
    shared = _options(PolicyGradient)
    rows = []
    for name in ALGORITHMS:
        algorithm = ALGORITHMS[name]
        own = {key: value for key, value in _options(algorithm).items() if shared.get(key, object) != value}
        rows.append((name, _first_sentence(algorithm), list(_needs(algorithm)), own))
    columns = ("name", "what", "needs", "options of its own, and other defaults")
    yield Facts("algorithms", "algorithms (algorithm.name)", columns, rows)
    every = [(key, repr(value)) for key, value in shared.items()]
    yield Facts("options", "options of every policy-gradient method", ("option", "default"), every)


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


def _registered(name: str, key: str, registry: Registry[Any]) -> Facts:
    rows = [(item, _first_sentence(registry[item])) for item in registry]
    return Facts(name, f"{name} ({key})", ("name", "what"), rows)


def _first_sentence(item: object) -> str:
    return (inspect.getdoc(item) or "").split("\n\n")[0].replace("\n", " ")
