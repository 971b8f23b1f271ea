"""What TRL's scripts read from a command line: `TrlParser`, the sections beside the configs, and what becomes of them."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from rl4llm.core.errors import ConfigError


@dataclass
class ScriptArguments:
    """The data set of a script, by its name on the hub or its directory."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


@dataclass
class ModelConfig:
    """Name the model of a script, and its adapter."""

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = field(
        default="float32", metadata={"choices": ["auto", "bfloat16", "float16", "float32"]}
    )
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = field(default="nf4", metadata={"choices": ["fp4", "nf4"]})
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        if self.lora_target_modules is not None and len(self.lora_target_modules) == 1:
            # a pattern
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]


@dataclass
class DatasetConfig:
    """One data set of a mixture, as `datasets.load_dataset` takes it; `fraction` is its share of the mixture."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: Any = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Several data sets, from a file of `--config`."""

    datasets: list[DatasetConfig] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        self.datasets = [DatasetConfig(**item) if isinstance(item, dict) else item for item in self.datasets]


class TrlParser(HfArgumentParser):
    """A parser of dataclasses that also reads ``--config FILE``, a YAML file of defaults; `env` in it sets variables.

    >>> TrlParser(ScriptArguments).parse_args_and_config(["--dataset_name", "rows"])[0].dataset_name
    'rows'
    """

    def __init__(self, dataclass_types: Any = None, **options: Any):
        kinds = list(dataclass_types) if isinstance(dataclass_types, Iterable) else [dataclass_types]
        for kind in filter(None, kinds):
            if any(item.name == "config" for item in fields(kind)):
                raise ConfigError(
                    f"{kind.__name__} has a field `config`, but --config names a file. Rename the field."
                )
        super().__init__([kind for kind in kinds if kind is not None], **options)
        for action in self._actions:
            if action.default is None and action.type in (int, float, dict):
                action.type = _or_none(action.type)

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Return an object of each dataclass, and with `return_remaining_strings` what none of them knows."""
        words = list(sys.argv[1:] if args is None else args)
        unknown: list[str] = []
        if "--config" in words:
            place = words.index("--config")
            unknown = self.set_defaults_with_config(**_config(words[place + 1 : place + 2]))
            del words[place : place + 2]
        made = self.parse_args_into_dataclasses(words, return_remaining_strings=return_remaining_strings)
        if not return_remaining_strings:
            if unknown and fail_with_unknown_args:
                raise ConfigError(f"--config has unknown keys: {' '.join(unknown)}. Remove them.")
            return tuple(made)
        *objects, rest = made
        if separate_remaining_strings:
            return (*objects, unknown, rest)
        return (*objects, [*unknown, *rest])

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Replace defaults; return, as words of a command line, what no argument has the name of."""
        known = set()
        for action in self._actions:
            if action.dest in values:
                action.default, action.required = values[action.dest], False
                known.add(action.dest)
        return [
            word for name, value in values.items() if name not in known for word in (f"--{name}", str(value))
        ]


def _or_none(kind: Any) -> Any:
    """Return a type of arguments that also reads none and null."""

    def read(text: str) -> Any:
        return None if text.lower() in ("none", "null") else kind(text)

    read.__name__ = kind.__name__  # which argparse puts into its errors
    return read


def _config(path: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a file, after setting the variables of its `env`."""
    if not path or not Path(path[0]).is_file():
        raise ConfigError(f"--config {' '.join(path)} is not a file. Accepted: a YAML file.")
    values = yaml.safe_load(Path(path[0]).read_text()) or {}
    variables = values.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ConfigError(
            f"{path[0]}: env={variables!r:.100} is not accepted. Accepted: a mapping of variables."
        )
    os.environ.update({name: str(value) for name, value in variables.items()})
    return values


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """Load the data sets of a mixture, one after the other, and return them by split."""
    import datasets  # noqa: PLC0415 - takes seconds

    parts = mixture_config.datasets
    if not parts:
        raise ConfigError("datasets is empty. Name one or more in the file of --config.")
    loaded = []
    for part in parts:
        where = {
            "name": part.name,
            "data_dir": part.data_dir,
            "data_files": part.data_files,
            "split": part.split,
        }
        rows = datasets.load_dataset(part.path, streaming=mixture_config.streaming, **where)
        loaded.append(rows if part.columns is None else rows.select_columns(part.columns))
    shares = [part.fraction for part in parts if part.fraction is not None]
    if shares and (len(shares) < len(parts) or mixture_config.streaming):
        raise ConfigError("datasets: set `fraction` for all of them or for none, and not with streaming.")
    if shares:
        most = min(
            len(rows) * sum(shares) / share for rows, share in zip(loaded, shares, strict=True) if share
        )
        counts = [round(share / sum(shares) * most) for share in shares]
        loaded = [rows.select(range(count)) for rows, count in zip(loaded, counts, strict=True)]
    mixed = datasets.concatenate_datasets(loaded)
    if mixture_config.test_split_size is None:
        return datasets.DatasetDict({"train": mixed})
    return mixed.train_test_split(test_size=mixture_config.test_split_size)


def get_peft_config(model_args: Any) -> dict[str, Any] | None:
    """Return the `peft_config` of a script's arguments, or None; warn that adapters have no dropout, TRL's default."""
    if not model_args.use_peft:
        return None
    chosen = {
        "r": model_args.lora_r,
        "lora_alpha": model_args.lora_alpha,
        "target_modules": model_args.lora_target_modules,
        "target_parameters": model_args.lora_target_parameters,
        "modules_to_save": model_args.lora_modules_to_save,
        "use_rslora": model_args.use_rslora,
        "use_dora": model_args.use_dora,
        "lora_dropout": model_args.lora_dropout,
    }
    if chosen["lora_dropout"] == ModelConfig.lora_dropout:
        warnings.warn("lora_dropout=0.05, TRL's default, is ignored: adapters have no dropout.", stacklevel=2)
        chosen["lora_dropout"] = 0.0
    return chosen


def get_quantization_config(model_args: Any) -> None:
    """Return None. Raises ConfigError for weights of 4 or 8 bits."""
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(model_args, name):
            raise ConfigError(
                f"{name} has no counterpart: rl4llm does not train quantized weights. Leave it out."
            )


def get_kbit_device_map() -> None:
    """Return None: each process has one device."""
