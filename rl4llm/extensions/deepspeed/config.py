"""DeepSpeed's configuration: any section passes through, and settings that contradict rl4llm's keys are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from rl4llm.core.errors import ConfigError

Source = Mapping[str, Any] | str | Path | None
"""DeepSpeed's configuration: a mapping, or a JSON or YAML file."""
LARGEST_BUCKET = 500_000_000  # DeepSpeed's default
OURS = {
    "train_batch_size": "rollout.prompts and training.updates_per_rollout",
    "train_micro_batch_size_per_gpu": "training.max_tokens_per_batch",
    "gradient_accumulation_steps": "training.max_tokens_per_batch",
    "managed_gradient_accumulation": "nothing: the trainer decides when a step is complete",
    "gradient_allreduce_op": "nothing: losses are sums over all ranks",
    "optimizer": "training.lr, training.betas and training.weight_decay",
    "scheduler": "training.schedule and training.warmup_steps",
    "fp16": "model.dtype=bfloat16 or model.autocast=bfloat16, which need no loss scaling",
    "amp": "model.autocast",
    "torch_autocast": "model.autocast",
    "activation_checkpointing": "model.gradient_checkpointing",
    "zero_force_ds_cpu_optimizer": "nothing: the optimizer is always rl4llm's",
}
"""Sections that duplicate a key of rl4llm, and that key. Those that leave everything to the trainer are ignored."""

AS_OURS = {"optimizer": ("Adam", "AdamW"), "scheduler": ("WarmupLR",)}
"""Types of sections whose values may all be "auto", and mean what rl4llm does."""

STAYS = {
    1: "With zero_stage=1 a bf16 model cannot leave the device between updates. Set backend.zero_stage to 2 or 3.",
    3: "With zero_stage=3 a model that does not train cannot leave the device. Set backend.offload_param=true, or "
    "backend.zero_stage=2.",
}
"""By stage, which models stay on the device."""


@dataclass(frozen=True, slots=True)
class ZeroOptions:
    """The DeepSpeed options that are keys of rl4llm.

    Stage 0 replicates everything, 1 shards the optimizer, 2 also the gradients, 3 also the weights. The default is the
    stage in the section `zero_optimization`, or 2.
    """

    stage: int | None = None
    offload_optimizer: bool = False
    offload_param: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ZeroOptions:
        """Read the keys of the section `backend`."""
        offloads = [bool(options.get(key)) for key in ("offload_optimizer", "offload_param")]
        return cls(options.get("zero_stage"), *offloads)


def engine_config(
    source: Source,
    zero: ZeroOptions,
    *,
    bf16: bool,
    max_grad_norm: float | None,
    trained: int,
) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`. Raises ConfigError if it contradicts rl4llm's keys.

    `trained` is the number of values that train; `max_grad_norm` is None where a configuration is only checked.
    """
    settings = _read(source).items()
    config = _without_auto({key: value for key, value in settings if not _is_ours_to_set(key, value)})
    section = config.pop("bfloat16", None) or config.get("bf16", {})
    sharding = config.get("zero_optimization", {})
    _check_agreement(
        config,
        {
            "bf16.enabled": (section.get("enabled"), bf16, "model.dtype"),
            "gradient_clipping": (config.get("gradient_clipping"), max_grad_norm, "training.max_grad_norm"),
            "zero_optimization.stage": (sharding.get("stage"), zero.stage, "backend.zero_stage"),
        },
    )
    config["zero_optimization"] = _zero(sharding, zero, trained)
    config["bf16"] = {"check_grad_overflow": True} | section | {"enabled": bf16}
    if bf16:  # sums of micro-batches, and of ranks, in fp32
        config["data_types"] = {"grad_accum_dtype": "fp32"} | config.get("data_types", {})
    return config | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def zero_section(source: Source, zero: ZeroOptions, trained: int) -> dict[str, Any]:
    """Return the section `zero_optimization` that `engine_config` will use."""
    return _zero(_without_auto(_read(source)).get("zero_optimization", {}), zero, trained)


def check_leaves(zero: Mapping[str, Any], dtype: str, reference: bool) -> None:
    """Raise ConfigError if models with this section, or a `reference` that ranks share, cannot leave the device."""
    stays = {1: dtype == "bfloat16", 3: reference}.get(zero["stage"])
    offload = zero.get("offload_optimizer" if zero["stage"] == 1 else "offload_param", {})
    if stays and offload.get("device", "none") == "none":
        raise ConfigError(STAYS[zero["stage"]])


def _read(source: Source) -> dict[str, Any]:
    if isinstance(source, str | Path):
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(source)))
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(dict(source or {}))))


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    """Drop the values "auto", which other trainers fill in; DeepSpeed itself does not know the word."""
    values = {key: value for key, value in config.items() if value != "auto"}
    return {key: _without_auto(item) if isinstance(item, dict) else item for key, item in values.items()}


def _is_ours_to_set(key: str, value: Any) -> bool:
    """Return whether a setting that duplicates a key of rl4llm is off, or leaves its values to the trainer."""
    if key not in OURS or not isinstance(value, dict):
        return key == "zero_force_ds_cpu_optimizer" and value is False
    if key in AS_OURS:
        return not value or (value.get("type") in AS_OURS[key] and not _without_auto(value.get("params", {})))
    return value.get("enabled", any(_without_auto(value).values())) in (False, "auto")


def _check_agreement(config: Mapping[str, Any], shared: Mapping[str, tuple[Any, Any, str]]) -> None:
    """Raise ConfigError with all settings that contradict keys of rl4llm: its own, and `shared` ones that differ."""
    refused = {key: (config[key], name) for key, name in OURS.items() if config.get(key) is not None}
    for key, (value, ours, name) in shared.items():
        if None not in (value, ours) and value != ours:
            refused[key] = value, f"{name}, which is {ours}"
    if refused:
        settings = "; ".join(f"{key}={value!r} (set {name})" for key, (value, name) in refused.items())
        raise ConfigError(f"The DeepSpeed configuration sets what rl4llm sets itself. Remove {settings}.")


def _zero(section: dict[str, Any], zero: ZeroOptions, trained: int) -> dict[str, Any]:
    stage = section.get("stage", 2 if zero.stage is None else zero.stage)
    # DeepSpeed allocates a whole bucket in every step: 2 GB even for the smallest model, which torch fills if deterministic.
    section = {"reduce_bucket_size": min(LARGEST_BUCKET, max(trained, 1))} | section | {"stage": stage}
    offloads = {"offload_optimizer": (zero.offload_optimizer, 1), "offload_param": (zero.offload_param, 3)}
    for key, (is_set, lowest) in offloads.items():
        if is_set:
            section[key] = {"device": "cpu"} | section.get(key, {})
        if section.get(key, {}).get("device", "none") != "none" and stage < lowest:
            raise ConfigError(f"{key} has no effect with zero_stage={stage}. Set it to {lowest} or above.")
    return section


def check_precision(dtype: str, stage: int, trains: bool) -> None:
    """Raise ConfigError where DeepSpeed would sum gradients in bf16."""
    if trains and stage == 0 and dtype == "bfloat16":
        raise ConfigError(
            "zero_stage=0 with model.dtype=bfloat16 sums gradients in bf16, an error of 2 to 5 %. Set zero_stage to 1, or "
            "model.dtype=float32 with model.autocast=bfloat16."
        )
