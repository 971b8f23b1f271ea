"""TRL's configs, as scripts write them: ``GRPOConfig(output_dir="out", num_generations=8)``."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar

from rl4llm.core.errors import ConfigError
from rl4llm.trl.table import TABLES


class TRLConfig:
    """The names of one of TRL's configs, with TRL's defaults; which they are and what they become says `rl4llm.trl.table`.

    `given` holds the names that a script has set itself. Raises ConfigError for names that TRL does not have either.
    """

    algorithm: ClassVar[str]
    given: set[str]

    def __init__(self, output_dir: Any = None, **values: Any):
        self.__dict__.update({name: alias.default for name, alias in TABLES[self.algorithm].items()}, given=set())
        for name, value in (values if output_dir is None else {"output_dir": output_dir, **values}).items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        known = TABLES[self.algorithm]
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else " docs/migration.md has those that are."
            raise ConfigError(f"{type(self).__name__}: {name!r} is no name of TRL's that is known here.{hint}")
        self.__dict__[name] = value
        self.given.add(name)

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={getattr(self, name)!r}" for name in sorted(self.given))
        return f"{type(self).__name__}({said})"


class GRPOConfig(TRLConfig):
    """Of `rl4llm.GRPOTrainer`."""

    algorithm = "grpo"


class DPOConfig(TRLConfig):
    """Of `rl4llm.DPOTrainer`."""

    algorithm = "dpo"


class KTOConfig(TRLConfig):
    """Of `rl4llm.KTOTrainer`."""

    algorithm = "kto"


class RewardConfig(TRLConfig):
    """Of `rl4llm.RewardTrainer`."""

    algorithm = "reward_model"


class SFTConfig(TRLConfig):
    """Of `rl4llm.SFTTrainer`."""

    algorithm = "sft"
