"""A stand-in for the package `trl`: scripts import its names, and get ours or an error that says what to use."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from rl4llm.core.errors import ConfigError
from rl4llm_compat import trl

TRAINERS = ("DPO", "GRPO", "KTO", "RLOO", "Reward", "SFT")
PACKAGES = ("trl", "trl.models", "trl.rewards", "trl.scripts", "trl.trainer")
MODULES = (
    *PACKAGES, "trl.data_utils", "trl.scripts.utils", "trl.trainer.utils", "trl.trainer.model_config",
    "trl.rewards.accuracy_rewards", "trl.rewards.format_rewards", "trl.rewards.other_rewards",
    *(f"trl.trainer.{name.lower()}_{what}" for name in TRAINERS for what in ("config", "trainer")),
)  # fmt: skip
PPO = (
    "rl4llm.PPOTrainer takes a model, a dataset and rewards. TRL's learning_rate is also that of the critic: set "
    "training.lr and algorithm.critic_lr to it"
)
INSTEAD = {
    "PPO": PPO,
    ".ppo": PPO,
    "Callback": "every step is in metrics.jsonl and every episode in episodes/; `rl4llm view` shows them",
    "create_reference_model": "leave it out: the reference is the initial policy",
    "clone_chat_template": "set tokenizer.chat_template",
    "pack_dataset": "leave it out: sequence packing is always on, and rows are not tokenized before",
    "truncate_dataset": "leave it out: nothing is truncated",
    "multimodal": "leave it out: images of rows are shown where TRL shows them",
    "experimental": f"the trainers are {', '.join(TRAINERS)}; `algorithm.name` has further methods, see docs/algorithms.md",
}
"""Parts of names without a counterpart, and what to use instead."""


def refusal(name: str) -> str:
    """Return why a name of `trl` is refused."""
    instead = next(
        (says for part, says in INSTEAD.items() if part in name), "docs/migration.md lists the known names"
    )
    return f"{name} has no counterpart in rl4llm. Instead: {instead}."


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        if name not in trl.__all__:
            raise ConfigError(refusal(f"{self.__name__}.{name}"))
        return getattr(trl, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] != "trl":
            return None
        if name not in MODULES:
            raise ConfigError(refusal(name))
        return importlib.machinery.ModuleSpec(name, self, is_package=name in PACKAGES)

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__version__"] = "rl4llm"


def install() -> None:
    """Let this process import rl4llm's names from `trl`, whether or not that is installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
