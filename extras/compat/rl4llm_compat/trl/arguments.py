"""TRL's configs, as written in scripts: ``GRPOConfig(output_dir="out", num_generations=8)``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl4llm.core.errors import ConfigError
from rl4llm_compat.trl.table import TABLES, Alias

Options: Any = dict | str | None
"""A mapping, on a command line JSON; the parser compares the type itself."""

NAMES: Mapping[Any, str] = {
    bool | None: (
        "activation_checkpointing completion_only_loss ddp_broadcast_buffers ddp_find_unused_parameters ddp_static_graph "
        "disable_tqdm eval_packing greater_is_better hub_private_repo tf32"
    ),
    bool: "bf16 disable_dropout",
    float: "eval_delay logging_steps save_steps warmup_steps",
    float | None: (
        "center_rewards_coefficient delta epsilon_high eval_steps ld_alpha min_p neftune_noise_alpha router_aux_loss_coef "
        "off_policy_mask_threshold vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min warmup_ratio"
    ),
    int | None: (
        "data_seed dataloader_prefetch_factor dataset_num_proc ddp_bucket_cap_mb eval_accumulation_steps "
        "generation_batch_size max_completion_length max_length max_prompt_length max_tool_calling_iterations "
        "num_completions_to_print num_generations num_generations_eval precompute_ref_batch_size save_total_limit "
        "steps_per_generation torch_empty_cache_steps vllm_max_model_length"
    ),
    list[float] | None: "loss_weights reward_clip_range reward_weights",
    list[str] | None: "include_for_metrics label_names",
    None | str | list[str]: "optim_target_modules report_to",
    Options: (
        "accelerator_config activation_checkpointing_kwargs chat_template_kwargs dataset_kwargs deepspeed fsdp_config "
        "generation_kwargs gradient_checkpointing_kwargs liger_kernel_config lr_scheduler_kwargs model_init_kwargs "
        "transformers_continuous_batching_config"
    ),
}
"""Types of the names whose default has another one. All others with the default None are strings."""

TYPES = {name: kind for kind, names in NAMES.items() for name in names.split()}
CHOICES = {name: {"nargs": "?", "const": True} for name in ("activation_checkpointing", "fsdp")}
"""Options of arguments whose value may be left out."""


def fields_of(table: Mapping[str, Alias]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the type and the default of each argument, as `dataclasses` wants them."""
    for name, alias in table.items():
        kind = TYPES.get(name, str | None if alias.default is None else type(alias.default))
        if name == "loss_type" and alias.default == "sigmoid":  # the one that takes several
            yield name, list[str], field(default_factory=lambda: ["sigmoid"])
            continue
        yield name, kind, field(default=alias.default, metadata=CHOICES.get(name, {}))


class TRLConfig:
    """The names of one of TRL's configs, with TRL's defaults; `rl4llm_compat.trl.table` lists them.

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
