"""TRL's configs, as written in scripts: ``GRPOConfig(output_dir="out", num_generations=8)``."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.trl.fields import TYPES, Options, fields_of
from rl4llm.extensions.trl.table import TABLES


class TRLConfig:
    """The names of one of TRL's configs, with TRL's defaults; `rl4llm.extensions.trl.table` lists them.

    They are dataclasses, so that `TrlParser` and transformers' HfArgumentParser read them from a command line. `given`
    contains the names that a script has set. Raises ConfigError for names that TRL does not have either.
    """

    algorithm: ClassVar[str]
    given: set[str]

    def __init_subclass__(cls) -> None:
        cls.__annotations__ = {}
        for name, kind, default in fields_of(TABLES[cls.algorithm]):
            cls.__annotations__[name] = kind
            setattr(cls, name, default)
        dataclass(init=False, repr=False, eq=False)(cls)

    def __init__(self, output_dir: Any = None, **values: Any):
        table = TABLES[self.algorithm]
        self.__dict__.update({name: alias.default for name, alias in table.items()}, given=set())
        values = values if output_dir is None else {"output_dir": output_dir, **values}
        # a parser passes every name, whether or not somebody has set it
        parsed = values.keys() == table.keys()
        for name, value in values.items():
            if not parsed or value != table[name].default:
                setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        known = TABLES[self.algorithm]
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else " docs/migration.md lists the known names."
            raise ConfigError(f"{type(self).__name__}: {name!r} is not a known name of TRL.{hint}")
        if TYPES.get(name) == Options and isinstance(value, str) and value.startswith("{"):
            value = json.loads(value)
        self.__dict__[name] = value
        self.given.add(name)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in sorted(self.given))
        return f"{type(self).__name__}({values})"


class GRPOConfig(TRLConfig):
    """The options of `GRPOTrainer`."""

    algorithm = "grpo"


class RLOOConfig(TRLConfig):
    """The options of `RLOOTrainer`."""

    algorithm = "rloo"


class DPOConfig(TRLConfig):
    """The options of `DPOTrainer`."""

    algorithm = "dpo"


class KTOConfig(TRLConfig):
    """The options of `KTOTrainer`."""

    algorithm = "kto"


class RewardConfig(TRLConfig):
    """The options of `RewardTrainer`."""

    algorithm = "reward_model"


class SFTConfig(TRLConfig):
    """The options of `SFTTrainer`."""

    algorithm = "sft"
