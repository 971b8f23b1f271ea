"""The tables of ``rl4llm info``: versions, devices and registered names.

Names and descriptions are read from tables and source files, so the command need not import torch. Only the topics
"algorithms" and "devices" import what they describe.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl4llm import TESTED_TORCH, __version__
from rl4llm.commands.completers import registries
from rl4llm.commands.output import Facts
from rl4llm.core.errors import RL4LLMError
from rl4llm.core.registry import Registry
from rl4llm.core.tables import ALGORITHMS
from rl4llm.runtime.gpus import GPU

PACKAGES = (
    "torch", "transformers", "datasets", "omegaconf", "math-verify", "deepspeed", "sglang", "vllm", "peft", "wandb",
)  # fmt: skip
NAMES = registries()


def facts(topic: str | None = None) -> Iterator[Facts]:
    """Yield the tables of one topic, or of all topics."""
    if topic is None:
        yield _versions()
        yield Facts("devices", "devices", ("device", "what"), list(_devices()))
    if topic == "devices":
        yield Facts("devices", "devices", ("device", "what"), list(_devices_of_torch()))
    if topic == "algorithms":
        yield from _algorithms()
    for name in NAMES if topic is None else {topic} & NAMES.keys() - {"algorithms"}:
        rows = [(item, first_sentence(NAMES[name], item)) for item in NAMES[name]]
        yield Facts(name, f"{name} ({NAMES[name].where})", ("name", "what"), rows)


def first_sentence(table: Registry[Any], name: str) -> str:
    """Return the first paragraph of the docstring of a registered name, from its source file where possible."""
    module, _, attribute = table.path_of(name).partition(":")
    try:
        text = _docstring(module, attribute) or inspect.getdoc(table[name])
    except (RL4LLMError, ImportError) as error:
        text = str(error)
    return (text or "").split("\n\n")[0].replace("\n", " ")


def _docstring(module: str, attribute: str) -> str | None:
    """Read the docstring of a class or function without importing its module; return None if its source has none."""
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations or not inner:
        return None
    file = Path(spec.submodule_search_locations[0], *inner).with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == attribute:
            return ast.get_docstring(node)
    return None


def _versions() -> Facts:
    rows = [("rl4llm", __version__), ("python", platform.python_version())]
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        else:
            if package == "torch" and version.rpartition(".")[0] not in TESTED_TORCH:
                version += f" (not tested; the tests run with {', '.join(TESTED_TORCH)})"
        rows.append((package, version))
    return Facts("versions", "versions", ("package", "version"), rows)


def _devices() -> Iterator[tuple[str, str]]:
    """Yield the processors that the operating system reports; `_devices_of_torch` yields those of torch."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    yield "cpu", f"{cores} cores"
    for index, file in enumerate(sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))):
        lines = dict(line.partition(":")[::2] for line in file.read_text(errors="replace").splitlines())
        yield f"{GPU}:{index}", lines.get("Model", "NVIDIA").strip()


def _devices_of_torch() -> Iterator[tuple[str, str]]:
    import torch

    from rl4llm.runtime import devices
    from rl4llm.runtime.cpu import prefers_onednn

    kernels = "oneDNN" if prefers_onednn() else "torch's default"
    yield "cpu", f"{torch.get_num_threads()} threads, fp32 products by {kernels}"
    for device in devices.names():
        name, size = devices.properties(device)
        yield device, f"{name}, {size / 2**30:.0f} GiB"


def _algorithms() -> Iterator[Facts]:
    """Yield every method with its needs and special options, then the options of all policy-gradient methods."""
    from rl4llm.algorithms.policy_gradient import PolicyGradient

    shared = _options(PolicyGradient)
    rows: list[tuple[Any, ...]] = []
    for name in ALGORITHMS:
        what = first_sentence(ALGORITHMS, name)
        try:
            algorithm = ALGORITHMS[name]
        except (RL4LLMError, ImportError):  # `what` contains the error
            rows.append((name, what, [], {}))
            continue
        special = {
            key: value for key, value in _options(algorithm).items() if shared.get(key, object) != value
        }
        rows.append((name, what, list(_needs(algorithm)), special))
    columns = ("name", "what", "needs", "special options and defaults")
    yield Facts("algorithms", "algorithms (algorithm.name)", columns, rows)
    every = [(key, repr(value)) for key, value in shared.items()]
    yield Facts("options", "options of all policy-gradient methods", ("option", "default"), every)


def _options(algorithm: type) -> dict[str, Any]:
    return {
        item.name: item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        for item in dataclasses.fields(algorithm)
        if item.init
    }


def _needs(algorithm: Callable[[], Any]) -> Iterator[str]:
    """Yield the needs that the algorithm has with its default options."""
    from rl4llm.core.base_algorithm import Needs

    nothing, needs = Needs(every_token=False), algorithm().needs()
    for item in dataclasses.fields(Needs):
        value = getattr(needs, item.name)
        if value != getattr(nothing, item.name):
            plain = value is True or item.name in ("critic", "sampling")
            yield item.name if plain else f"{item.name}={value}"
