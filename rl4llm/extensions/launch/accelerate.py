"""What a file of `accelerate launch` asks for, compared with the configuration, which alone decides in rl4llm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl4llm.compose.setup import Machine
from rl4llm.config import Config, flatten
from rl4llm.core.errors import ConfigError

OFFLOAD = "ACCELERATE_DEEPSPEED_OFFLOAD_{}_DEVICE"
FOREIGN = (
    ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron-LM"),
    ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "a parallelism_config"),
    ("ACCELERATE_MIXED_PRECISION", "fp16", "mixed_precision: fp16"),
    ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed_precision: fp8"),
    (OFFLOAD.format("OPTIMIZER"), "nvme", "offloading to nvme, except in `backend.config`"),
    (OFFLOAD.format("PARAM"), "nvme", "offloading to nvme, except in `backend.config`"),
)
"""Variables that accelerate sets for its processes, with the values that have no counterpart, and what those mean."""


def check_accelerate(config: Config, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if accelerate's file asks for sharding or a precision that the configuration does not have."""
    for name, value, what in FOREIGN:
        if environ.get(name) == value:
            raise ConfigError(
                f"The file of `accelerate launch` asks for {what}, which rl4llm does not have. "
                "Next: remove it from that file, or start the processes with `rl4llm launch`."
            )
    given, wanted = flatten(config), _keys(environ)
    if environ.get("ACCELERATE_MIXED_PRECISION") == "bf16" and Machine.of(config).computed != "bfloat16":
        wanted["model.autocast"] = "bfloat16"
    if config.backend.get("config"):  # its file has the rest
        wanted.pop("backend.zero_stage", None)
    missing = [f"{key}={str(value).lower() if value is True else value}" for key, value in wanted.items()
               if given.get(key) != value]  # fmt: skip
    if missing:
        raise ConfigError(
            "The file of `accelerate launch` (FSDP, DeepSpeed or mixed_precision) asks for other values than the "
            f"configuration, which alone decides here. Next: add {' '.join(missing)}, or remove that from the file."
        )


def _keys(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return our keys for the sharding that accelerate's variables ask for."""
    if environ.get("ACCELERATE_USE_FSDP") == "true" and environ.get("FSDP_SHARDING_STRATEGY") != "NO_SHARD":
        names = {
            "FSDP_OFFLOAD_PARAMS": "backend.cpu_offload",
            "FSDP_ACTIVATION_CHECKPOINTING": "model.gradient_checkpointing",
        }
        return {"backend.shard": "fsdp2"} | {
            key: True for name, key in names.items() if environ.get(name) == "true"
        }
    if environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return {}
    if file := environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        return {"backend.name": "deepspeed", "backend.config": file}
    wanted = {
        "backend.name": "deepspeed",
        "backend.zero_stage": int(environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)),
    }
    on_cpu = [what for what in ("optimizer", "param") if environ.get(OFFLOAD.format(what.upper())) == "cpu"]
    return wanted | {f"backend.offload_{what}": True for what in on_cpu}
