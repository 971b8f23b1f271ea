"""The table of TRL's names, `trl.yaml`, for each of our trainers.

A script's names are looked up here and nowhere else. A config object has all of TRL's defaults, single keyword arguments
of a trainer only change what they name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rl4llm.core.errors import ConfigError

Keys = dict[str, Any]
"""Dotted configuration keys and their values."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A name of TRL's trainers or configs.

    Args:
        kind: "key" becomes one or more keys; "joint" is combined with other names, see `rl4llm_compat.trl.joint`;
            "inert" has no effect, which is logged as a warning; "refused" has no counterpart but would change the result,
            so that any value except `default` is an error.
        default: TRL's default.
        says: the key it becomes, why it has no effect, or what to do instead.
        keys: returns the configuration keys for a value of a "key".
    """

    kind: Literal["key", "joint", "inert", "refused"]
    default: Any
    says: str
    keys: Callable[[Any], Keys] = lambda value: {}


def _lr_schedule(value: Any) -> str:
    name = str(getattr(value, "value", value))
    known = {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
    }
    if name not in known:
        raise ConfigError(f"lr_scheduler_type={name!r} has no counterpart. Accepted: {', '.join(known)}.")
    return known[name]


def _model_options(value: Any) -> Keys:
    options = dict(value or {})
    dtype = options.pop("dtype", options.pop("torch_dtype", None))
    for name in ("attn_implementation", "device_map", "use_cache"):  # how it is computed is decided here
        options.pop(name, None)
    others = {name: value for name, value in options.items() if value not in _PLAIN_MODEL.get(name, (None,))}
    if others:
        raise ConfigError(
            f"model_init_kwargs: {', '.join(others)} has no counterpart. Load the model, and pass the object."
        )
    return {} if dtype in (None, "auto") else {"model.dtype": str(dtype).removeprefix("torch.")}


_PLAIN_MODEL = {"revision": (None, "main"), "trust_remote_code": (None, False)}


def _scaling(value: Any) -> str:
    """Return the name of a scaling, which older scripts for TRL state as True or False."""
    return {True: "group", False: "none"}.get(value, value)


def _optimizer(value: Any) -> Keys:
    name = str(getattr(value, "value", value))
    if name not in ("adamw_torch", "adamw_torch_fused"):
        raise ConfigError(
            f"optim={name!r} has no counterpart: the optimizer is AdamW. Accepted: adamw_torch_fused."
        )
    return {}


def _likelihood(value: Any) -> Keys:
    """Accept the names of the loss that we have."""
    if value not in (None, "nll", "chunked_nll"):
        raise ConfigError(f"loss_type={value!r} has no counterpart. Accepted: nll, chunked_nll.")
    return {}


def _lora(value: Any) -> Keys:
    """Return the keys of peft's LoraConfig, or of a mapping of the same names; without targets, peft's of most models.

    Raises ConfigError for other methods, and for any other option that is not peft's default.
    """
    if value is None:
        return {}
    if getattr(value, "peft_type", "LORA") != "LORA":
        raise ConfigError(f"peft_config={type(value).__name__} has no counterpart. Accepted: LoraConfig.")
    chosen = dict(value) if isinstance(value, Mapping) else vars(value)
    defaults = dict.fromkeys(chosen) | _PLAIN_LORA if isinstance(value, Mapping) else vars(type(value)())
    for name in chosen.keys() - _LORA:
        if chosen[name] not in (defaults[name], None):
            raise ConfigError(
                f"peft_config.{name}={chosen[name]!r} has no counterpart. Accepted: {defaults[name]!r}."
            )
    targets = chosen.get("target_modules")
    if targets is None:
        targets = ["q_proj", "v_proj"]
    named = [] if targets == "all-linear" else [targets] if isinstance(targets, str) else sorted(targets)
    return {
        "model.lora.rank": chosen.get("r", 8),
        "model.lora.alpha": chosen.get("lora_alpha", 8),
        "model.lora.targets": named,
    }


_LORA = {
    *("r", "lora_alpha", "target_modules"),
    *("task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_type"),  # about the model
}
_PLAIN_LORA = {"lora_dropout": 0.0, "bias": "none", "use_rslora": False, "use_dora": False}


REFERENCE = "the reference is the initial policy; `algorithm.reference_every` resets it"

VALUES: Mapping[str, Callable[[Any], Any]] = {
    "as_it_is": lambda value: value,
    "scaling": _scaling,
    "schedule": _lr_schedule,
    "top_k": lambda count: max(0, count or 0),
}
"""What `by` names where `to` names the key."""

KEYS: Mapping[str, Callable[[Any], Keys]] = {
    "deepspeed": lambda file: {} if file is None else {"backend.name": "deepspeed", "backend.config": file},
    "likelihood": _likelihood,
    "lora": _lora,
    "model_options": _model_options,
    "on_cpu": lambda on: {"model.device": "cpu"} if on else {},
    "optimizer": _optimizer,
    "template_args": lambda options: {"env.template_args": dict(options)} if options else {},
}
"""What `by` names where the value becomes other keys, or none."""


def _aliases(section: Mapping[str, Any]) -> dict[str, Alias]:
    found = {name: _key(**item) for name, item in section.get("key", {}).items()}
    for kind in ("joint", "refused"):
        for name, (default, says) in section.get(kind, {}).items():
            found[name] = Alias(kind, tuple(default) if isinstance(default, list) else default, says)
    for why, names in section.get("inert", {}).items():
        found |= {name: Alias("inert", default, why) for name, default in names.items()}
    return found


def _key(default: Any, to: str = "", by: str = "as_it_is", note: str = "", says: str = "") -> Alias:
    if not to:
        return Alias("key", default, says, KEYS[by])
    return Alias("key", default, f"`{to}`{note and '; ' + note}", lambda value: {to: VALUES[by](value)})


_OWN = {
    name: _aliases(section)
    for name, section in yaml.safe_load(Path(__file__).with_name("trl.yaml").read_text("utf-8")).items()
}
CONSTRUCTOR = _OWN["constructor"]
"""Arguments of TRL's trainers beside their config."""

TABLES: dict[str, dict[str, Alias]] = {
    **{name: _OWN["common"] | _OWN["episodes"] | _OWN[name] for name in ("grpo", "rloo")},
    **{name: _OWN["common"] | _OWN["answers"] | _OWN[name] for name in ("dpo", "kto", "reward_model", "sft")},
}
"""By the trainer's algorithm."""
