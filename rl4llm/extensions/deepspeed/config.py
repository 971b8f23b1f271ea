"""DeepSpeed's configuration: any section passes through, and settings that contradict rl4llm's keys are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl4llm.core.errors import ConfigError

STAGES = (0, 1, 2, 3)
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
        return cls(
            options.get("zero_stage"),
            bool(options.get("offload_optimizer")),
            bool(options.get("offload_param")),
        )


def engine_config(
    given: Mapping[str, Any] | str | Path | None,
    zero: ZeroOptions,
    *,
    bf16: bool,
    max_grad_norm: float | None,
    trained: int,
) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`. Raises ConfigError if it contradicts rl4llm's keys.

    `trained` is the number of values that train; `max_grad_norm` is None where a configuration is only checked.
    """
    given = _read(given)
    config = _without_auto({key: value for key, value in given.items() if not _is_ours_to_set(key, value)})
    section = config.pop("bfloat16", None) or config.get("bf16", {})
    _check_agreement(config, section.get("enabled", bf16), zero, bf16, max_grad_norm)
    config["zero_optimization"] = _zero(_section(config), zero, trained)
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


def zero_section(
    given: Mapping[str, Any] | str | Path | None, zero: ZeroOptions, trained: int
) -> dict[str, Any]:
    """Return the section `zero_optimization` that `engine_config` will use. Raises ConfigError if options contradict
    it.
    """
    return _zero(_section(_without_auto(_read(given))), zero, trained)


def check_leaves(zero: Mapping[str, Any], dtype: str, reference: bool) -> None:
    """Raise ConfigError if models with this section, or a `reference` that ranks share, cannot leave the device."""

    def is_kept(key: str) -> bool:
        return bool(zero.get(key, {}).get("device", "none") == "none")

    if zero["stage"] == 1 and dtype == "bfloat16" and is_kept("offload_optimizer"):
        raise ConfigError(STAYS[1])
    if zero["stage"] == 3 and reference and is_kept("offload_param"):
        raise ConfigError(STAYS[3])


def _read(given: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return _plain(OmegaConf.create(dict(given)))
    if not Path(given).is_file():
        raise ConfigError(
            f"The DeepSpeed configuration {given} does not exist. Accepted: a JSON or YAML file."
        )
    try:
        loaded = OmegaConf.load(given)
    except Exception as error:
        raise ConfigError(f"The DeepSpeed configuration {given} is neither JSON nor YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(
            f"The DeepSpeed configuration {given} must hold a mapping, not a {type(loaded).__name__}."
        )
    return _plain(loaded)


def _plain(loaded: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(loaded)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    """Drop the values "auto", which other trainers fill in; DeepSpeed itself does not know the word."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto"
    }


def _is_ours_to_set(key: str, value: Any) -> bool:
    """Return whether a setting that duplicates a key of rl4llm is off, or leaves its values to the trainer."""
    if key not in OURS or not isinstance(value, dict):
        return key == "zero_force_ds_cpu_optimizer" and value is False
    if key in AS_OURS:
        return not value or (value.get("type") in AS_OURS[key] and not _without_auto(value.get("params", {})))
    return value.get("enabled", any(_without_auto(value).values())) in (False, "auto")


def _check_agreement(
    config: Mapping[str, Any], enabled: Any, zero: ZeroOptions, bf16: bool, max_grad_norm: float | None
) -> None:
    """Raise ConfigError with all settings that contradict keys of rl4llm."""
    dtype = "bfloat16" if bf16 else "float32"
    stage = _section(config).get("stage", zero.stage)
    agree = {
        "bf16.enabled": (enabled, bf16, f"model.dtype, which is {dtype}"),
        "gradient_clipping": (
            clipping := config.get("gradient_clipping", max_grad_norm),
            clipping if max_grad_norm is None else max_grad_norm,
            f"training.max_grad_norm, which is {max_grad_norm}",
        ),
        "zero_optimization.stage": (
            stage,
            stage if zero.stage is None else zero.stage,
            f"zero_stage, which is {zero.stage}",
        ),
    }
    refused = {key: (config[key], instead) for key, instead in OURS.items() if config.get(key) is not None}
    refused |= {key: (given, instead) for key, (given, ours, instead) in agree.items() if given != ours}
    if refused:
        given = ", ".join(f"{key}={value!r}" for key, (value, _) in refused.items())
        raise ConfigError(
            f"The DeepSpeed configuration sets {given}, which rl4llm sets itself. Next: remove "
            f"{', '.join(refused)} from it, and set {'; '.join(dict.fromkeys(instead for _, instead in refused.values()))}."
        )


def _section(config: Mapping[str, Any]) -> dict[str, Any]:
    section = config.get("zero_optimization", {})
    if not isinstance(section, dict):
        raise ConfigError(
            f"zero_optimization={section!r} in the DeepSpeed configuration is not accepted. Accepted: a section, such as "
            '{"stage": 2}.'
        )
    return section


def _zero(section: dict[str, Any], zero: ZeroOptions, trained: int) -> dict[str, Any]:
    stage = section.get("stage", 2 if zero.stage is None else zero.stage)
    if stage not in STAGES:
        raise ConfigError(f"zero_stage={stage!r} is not accepted. Accepted: {', '.join(map(str, STAGES))}.")
    # DeepSpeed allocates a whole bucket in every step: 2 GB even for the smallest model, which torch fills if deterministic.
    section = {"reduce_bucket_size": min(LARGEST_BUCKET, max(trained, 1))} | section | {"stage": stage}
    for key, wanted, lowest in (
        ("offload_optimizer", zero.offload_optimizer, 1),
        ("offload_param", zero.offload_param, 3),
    ):
        if wanted:
            section[key] = {"device": "cpu"} | section.get(key, {})
        if section.get(key, {}).get("device", "none") != "none" and stage < lowest:
            raise ConfigError(
                f"{key} needs zero_stage {lowest}{' or above' if lowest < 3 else ''}, not {stage}."
            )
    return section


def check_precision(dtype: str, stage: int, trains: bool) -> None:
    """Raise ConfigError for a dtype that DeepSpeed does not train."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"model.dtype={dtype} is not accepted with DeepSpeed. Accepted: float32, bfloat16.")
    if trains and stage == 0 and dtype == "bfloat16":
        raise ConfigError(
            "zero_stage=0 with model.dtype=bfloat16 is not accepted: DeepSpeed would sum gradients in bf16, an error of 2 "
            "to 5 %. Set zero_stage to 1, or model.dtype=float32 with model.autocast=bfloat16."
        )
