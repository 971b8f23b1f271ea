"""The types of TRL's arguments, by which a command line is parsed; the default of most says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from rl4llm.extensions.trl.alias import Alias

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
