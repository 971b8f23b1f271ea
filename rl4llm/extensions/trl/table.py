"""The names of TRL 1.16, and of transformers' TrainingArguments under it, for each of our trainers.

A script's names are looked up here and nowhere else. Values are TRL's defaults: a config object has all of them, single
keyword arguments of a trainer only change what they name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.trl.alias import Alias, Keys, each, inert, joint, key, refused

BATCH = "completions of an optimizer step on a process are `per_device_train_batch_size` x `gradient_accumulation_steps`"
SCHEDULE = "converted: one step of the loop takes `updates_per_rollout` x `epochs` optimizer steps"


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
    for name in (
        "attn_implementation",
        "device_map",
        "use_cache",
    ):  # how it is computed, which is decided here
        options.pop(name, None)
    others = {name: value for name, value in options.items() if value not in _PLAIN_MODEL.get(name, (None,))}
    if others:
        raise ConfigError(
            f"model_init_kwargs: {', '.join(others)} has no counterpart. Load the model, and pass the object."
        )
    return {} if dtype in (None, "auto") else {"model.dtype": str(dtype).removeprefix("torch.")}


_PLAIN_MODEL = {"revision": (None, "main"), "trust_remote_code": (None, False)}


def _scaling(value: Any) -> str:
    """True and False are TRL's older way to say it."""
    return {True: "group", False: "none"}.get(value, value)


def _top_k(value: Any) -> int:
    return max(0, value or 0)


def _optimizer(value: Any) -> Keys:
    name = str(getattr(value, "value", value))
    if name not in ("adamw_torch", "adamw_torch_fused"):
        raise ConfigError(
            f"optim={name!r} has no counterpart: the optimizer is AdamW. Accepted: adamw_torch_fused."
        )
    return {}


def _template_args(value: Any) -> Keys:
    return {"env.template_args": dict(value)} if value else {}


def _turns(value: Any) -> Keys:
    return {} if value is None else {"env.max_steps": value + 1}


def _likelihood(value: Any) -> Keys:
    if value not in (None, "nll", "chunked_nll"):
        raise ConfigError(f"loss_type={value!r} has no counterpart. Accepted: nll, chunked_nll.")
    return {}


def _deepspeed(value: Any) -> Keys:
    return {} if value is None else {"backend.name": "deepspeed", "backend.config": value}


def _lora(value: Any) -> Keys:
    """The keys of peft's LoraConfig, or of a mapping of the same names; without targets, peft's of most models.

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

_HERE = "export the model with `rl4llm export`, and upload that"
_LOGS = "every step is logged, to the console, metrics.jsonl and TensorBoard"
_FAST = "it affects only speed or memory, and rl4llm chooses it"
_LOADING = "rows are read once, in the trainer's process"
_RUNS = "a run in `output.dir` resumes automatically, and takes the same steps"
REFERENCE = "the reference is the initial policy; `algorithm.reference_every` resets it"

COMMON: dict[str, Alias] = {
    "output_dir": key("output.dir", "trainer_output"),
    "learning_rate": key("training.lr", 5e-5),
    "weight_decay": key("training.weight_decay", 0.0),
    "adam_beta1": joint(0.9, "`training.betas`"),
    "adam_beta2": joint(0.999, "`training.betas`"),
    "max_grad_norm": key("training.max_grad_norm", 1.0),
    "lr_scheduler_type": key("training.schedule", "linear", _lr_schedule, "constant, linear or cosine"),
    "warmup_steps": joint(0, "`training.warmup_steps`; below 1 a share of all steps. The first rate is not 0"),
    "warmup_ratio": joint(None, "`training.warmup_steps`, of all optimizer steps"),
    "max_steps": joint(-1, f"`max_steps`; {SCHEDULE}. As a keyword of a trainer it counts steps of the loop"),
    "num_train_epochs": joint(3.0, "`max_steps`, where TRL's `max_steps` is not set; needs rows, not a path"),
    "per_device_train_batch_size": joint(8, f"`rollout.prompts`; {BATCH}"),
    "gradient_accumulation_steps": joint(1, "`rollout.prompts`; micro-batches are cut by `training.max_tokens_per_batch`"),
    "seed": key("seed", 42),
    "full_determinism": key("deterministic", False),
    "bf16": joint(None, "`model.autocast`, bfloat16 if true or, in a config, if neither it nor fp16 is set"),
    "fp16": refused(False, "bf16=True, or bf16=False for float32"),
    "gradient_checkpointing": key("model.gradient_checkpointing", True),
    "model_init_kwargs": Alias("key", None, "`model.dtype`, of its `dtype`", _model_options),
    "optim": Alias("key", "adamw_torch_fused", "no key: rl4llm uses AdamW too", _optimizer),
    "use_cpu": Alias("key", False, "`model.device`, cpu if true", lambda value: {"model.device": "cpu"} if value else {}),
    "project": key("tracking.project", "huggingface"),
    "report_to": joint("none", "`tracking`, true for the names in it"),
    "save_strategy": joint("steps", "`checkpoint.every`, 0 for no"),
    "save_steps": joint(500, f"`checkpoint.every`; {SCHEDULE}"),
    "save_total_limit": joint(None, "`checkpoint.keep`; by default the last 2 are kept"),
    "eval_strategy": joint("no", "`eval.every`, 0 for no"),
    "eval_steps": joint(None, f"`eval.every`; {SCHEDULE}"),
    "adam_epsilon": refused(1e-8, "leave it out: it is 1e-8"),
    "lr_scheduler_kwargs": refused(None, "training.schedule has no options"),
    "optim_args": refused(None, "leave it out"),
    "optim_target_modules": refused(None, "leave it out"),
    "label_smoothing_factor": refused(0.0, "leave it out"),
    "neftune_noise_alpha": refused(None, "leave it out"),
    "trust_remote_code": refused(False, "load the model and tokenizer yourself, and pass the objects"),
    "router_aux_loss_coef": refused(None, "rl4llm has no load-balancing loss for experts"),
    "deepspeed": Alias("key", None, "`backend.name=deepspeed`, and `backend.config`, a file or a mapping", _deepspeed),
    "fsdp": refused(None, "backend={'name': 'torch', 'shard': 'fsdp2'}, and `rl4llm launch`"),
    "parallelism_config": refused(None, "`rl4llm launch` starts processes"),
    "push_to_hub": refused(False, _HERE),
    "load_best_model_at_end": refused(False, "choose a checkpoint with `rl4llm export --step`"),
    "auto_find_batch_size": refused(False, "training.max_tokens_per_batch bounds a micro-batch"),
    "data_seed": refused(None, "use seed; every random choice derives from it"),
    "eval_on_start": inert(False, "the held-out set is always measured at the start"),
    "run_name": inert(None, "`output.dir` names the run"),
    "resume_from_checkpoint": inert(None, _RUNS),
    "per_device_eval_batch_size": inert(8, "the held-out set is measured as a whole"),
    **each(inert, _LOGS, logging_strategy="steps", logging_steps=10, logging_first_step=False, logging_dir=None,
           logging_nan_inf_filter=True, log_level="passive", log_level_replica="warning", log_on_each_node=True,
           disable_tqdm=None, include_num_input_tokens_seen="no", trackio_space_id=None,
           trackio_bucket_id=None, trackio_static_space_id=None, skip_memory_metrics=True, debug=""),
    **each(inert, _FAST, tf32=None, use_liger_kernel=False, liger_kernel_config=None, torch_empty_cache_steps=None,
           torch_compile=False, torch_compile_backend=None, torch_compile_mode=None, gradient_checkpointing_kwargs=None,
           activation_checkpointing=None, activation_checkpointing_kwargs=None, bf16_full_eval=False, fp16_full_eval=False,
           use_cache=False, pad_to_multiple_of="auto", activation_offloading=False, accelerator_config=None,
           average_tokens_across_devices=True, ddp_find_unused_parameters=None, ddp_bucket_cap_mb=None,
           ddp_broadcast_buffers=None, ddp_static_graph=None, ddp_backend=None, ddp_timeout=1800, fsdp_config=None,
           local_rank=-1, enable_jit_checkpoint=False, disable_dropout=None),
    **each(inert, _LOADING, dataloader_drop_last=False, dataloader_num_workers=0, dataloader_pin_memory=True,
           dataloader_persistent_workers=False, dataloader_prefetch_factor=None, dataloader_multiprocessing_context=None,
           dataloader_in_order=True, dataset_num_proc=None, remove_unused_columns=True, label_names=None,
           train_sampling_strategy=None, length_column_name="length", group_by_length=False),
    **each(inert, _RUNS, ignore_data_skip=False, restore_callback_states_from_checkpoint=False, save_only_model=False,
           save_on_each_node=False, save_safetensors=True, overwrite_output_dir=False, do_train=False, do_eval=False,
           do_predict=False),
    **each(inert, "the held-out set has its own numbers", eval_delay=0, prediction_loss_only=False,
           eval_do_concat_batches=True, eval_use_gather_object=False, eval_accumulation_steps=None, include_for_metrics=None,
           batch_eval_metrics=False, metric_for_best_model=None, greater_is_better=None),
    **each(inert, "nothing is uploaded", hub_token=None, hub_private_repo=None, hub_model_id=None, hub_strategy="every_save",
           hub_always_push=False, hub_revision=None),
}  # fmt: skip
"""What all of TRL's configs have."""

EPISODES: dict[str, Alias] = COMMON | {
    "learning_rate": key("training.lr", 1e-6),
    "num_generations": key("rollout.group_size", 8),
    "max_completion_length": key("rollout.max_tokens", 512, note="of each turn"),
    "temperature": key("rollout.temperature", 1.0),
    "top_p": key("rollout.top_p", 1.0),
    "top_k": key("rollout.top_k", 0, _top_k),
    "shuffle_dataset": key("data.shuffle", True),
    "generation_batch_size": joint(None, "`rollout.prompts`, and `training.updates_per_rollout`"),
    "steps_per_generation": joint(None, "the same; divided by `gradient_accumulation_steps`: updates per rollout"),
    "num_iterations": joint(1, "`training.epochs`"),
    "beta": joint(0.0, "`algorithm.kl_coef`, estimated by k3 in the loss"),
    "use_bias_correction_kl": joint(True, "`algorithm.kl_weighted`, if `beta` is not 0"),
    "epsilon": joint(0.2, "`algorithm.clip_low`"),
    "epsilon_high": joint(None, "`algorithm.clip_high`, by default `epsilon`; in cispo the bound of the ratio itself"),
    "delta": joint(None, "`algorithm.dual_clip`"),
    "scale_rewards": key("algorithm.scale_rewards", "group", _scaling, "rl4llm adds 1e-6 to deviations, TRL adds 1e-4"),
    "mask_truncated_completions": key("algorithm.mask_truncated", False, note="with loss_type grpo and dr_grpo, TRL "
                                      "still counts masked answers in the mean"),
    "loss_type": refused("dapo", "only GRPOTrainer supports it; this trainer has a fixed loss"),
    "reward_weights": joint(None, "weights of the `reward_funcs`, in their order"),
    "use_vllm": joint(False, "`inference`, a server, with `vllm_mode='server'`; 'colocate' is the embedded engine"),
    **each(joint, "`inference.url`", vllm_mode="colocate", vllm_server_base_url=None, vllm_server_host="0.0.0.0",
           vllm_server_port=8000),
    **each(joint, "`algorithm.correction`, `correction_low` and `correction_high`, with `use_vllm`",
           vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="sequence_mask",
           vllm_importance_sampling_clip_max=3.0, vllm_importance_sampling_clip_min=None),
    "sync_ref_model": joint(False, "`algorithm.reference_every`"),
    "ref_model_mixup_alpha": joint(0.6, "only 1.0 with `sync_ref_model`: the reference becomes the policy, without mixing"),
    "ref_model_sync_steps": joint(512, f"`algorithm.reference_every`; {SCHEDULE}"),
    "entropy_coef": joint(0.0, "`algorithm.entropy_coef`, if all tokens of a step have the same weight (dapo, bnpo, cispo)"),
    "min_p": refused(None, "leave it out, or use rollout.top_p"),
    "repetition_penalty": refused(1.0, "leave it out: log-probs would not be the policy's; 'repetition' is a reward"),
    "generation_kwargs": refused(None, "rollout has temperature, top_p, top_k and stop"),
    "chat_template_kwargs": Alias("key", None, "`env.template_args`", _template_args),
    "multi_objective_aggregation": refused("sum_then_normalize", "reward_transform_fn sees the rewards by name"),
    "top_entropy_quantile": refused(1.0, "leave it out: every token trains"),
    "use_adaptive_entropy": refused(False, "algorithm.entropy_coef is constant"),
    "off_policy_mask_threshold": refused(None, "algorithm.correction=geometric_mask masks answers"),
    "cast_lm_head_to_fp32": refused(False, "leave it out; model.dtype=float32 computes all in it"),
    "max_tool_calling_iterations": Alias("key", None, "`env.max_steps` - 1, with tools; by default 15", _turns),
    "vllm_structured_outputs_regex": refused(None, "leave it out"),
    "remove_unused_columns": inert(False, _LOADING),
    "max_prompt_length": inert(None, "prompts are never truncated; one that leaves no room for an answer is refused"),
    "num_generations_eval": inert(None, "held-out prompts are answered once, at `eval.temperature`"),
    **each(inert, "every episode is stored; `rl4llm view` shows them", log_completions=False, log_multimodal=True,
           num_completions_to_print=None, log_unique_prompts=False, log_completions_hub_repo=None),
    **each(inert, _FAST, cache_implementation=None, ds3_gather_for_generation=True, use_transformers_paged=False,
           use_transformers_continuous_batching=False, transformers_continuous_batching_config=None),
    **each(inert, "an option of the server, `rl4llm serve vllm`", vllm_model_impl="vllm", vllm_enable_sleep_mode=False,
           vllm_server_timeout=240.0, vllm_group_port=51216, vllm_gpu_memory_utilization=0.3, vllm_max_model_length=None,
           vllm_tensor_parallel_size=1, vllm_importance_sampling_cap=None),
    **each(inert, "for use_adaptive_entropy", entropy_coef_min=0.0, entropy_coef_max=1.0, entropy_coef_delta=0.005,
           entropy_target=0.2),
    **each(inert, "for loss_type vespo", vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0),
}  # fmt: skip
"""Of trainers that sample for themselves; TRL has GRPO, PPO and DAPO take the same names."""

PPO: dict[str, Alias] = EPISODES | {
    "beta": key("algorithm.kl_coef", 0.0, note="in the reward, as `algorithm.kl_in` says"),
    "use_bias_correction_kl": refused(True, "algorithm.kl_weighted"),
}

GRPO: dict[str, Alias] = EPISODES | {
    "loss_type": joint("dapo", "`algorithm.name` and `algorithm.aggregation` (loss aggregation): grpo by sequence, dapo and "
                               "bnpo by token (TRL's bnpo by micro-batch), dr_grpo constant. cispo and sapo are algorithms"),
    "importance_sampling_level": joint("token", "sequence: `algorithm.name=gspo`"),
    "sapo_temperature_pos": joint(1.0, "`algorithm.tau_positive` of sapo"),
    "sapo_temperature_neg": joint(1.05, "`algorithm.tau_negative` of sapo"),
}  # fmt: skip

RLOO: dict[str, Alias] = EPISODES | {
    "num_generations": key("rollout.group_size", 2),
    "beta": key("algorithm.kl_coef", 0.05, note="in the reward, `algorithm.kl_in=reward`, estimated by k1"),
    "normalize_advantages": joint(False, "`algorithm.scale_rewards`, batch if true"),
    "reward_clip_range": refused(
        None, "clip in the reward functions, or use the wrapper rl4llm.rewards.Clip"
    ),
    "use_bias_correction_kl": inert(True, "the penalty is in the reward"),
    "scale_rewards": refused(None, "use normalize_advantages"),
}

ANSWERS: dict[str, Alias] = COMMON | {
    "learning_rate": key("training.lr", 1e-6),
    "max_length": inert(
        1024, "nothing is truncated; a row longer than the model's context is refused at the start"
    ),
    "max_prompt_length": inert(None, "nothing is truncated"),
    "max_completion_length": inert(None, "nothing is truncated"),
    "truncation_mode": inert("keep_start", "nothing is truncated"),
    "padding_free": inert(False, _FAST),
    "precompute_ref_log_probs": inert(False, _FAST),
    "precompute_ref_batch_size": inert(None, _FAST),
    "pad_token": key("model.pad_token", None),
    "sync_ref_model": refused(False, REFERENCE),
    "ref_model_mixup_alpha": inert(0.6, "for sync_ref_model"),
    "ref_model_sync_steps": inert(512, "for sync_ref_model"),
}
"""Of trainers that learn from answers in a dataset."""

DPO: dict[str, Alias] = ANSWERS | {
    "beta": key("algorithm.beta", 0.1),
    "label_smoothing": key("algorithm.label_smoothing", 0.0),
    "loss_type": joint(
        "sigmoid", "`algorithm.loss`, and for ipo `algorithm.length_normalized`; a name, or a list of one"
    ),
    "loss_weights": refused(None, "algorithm.nll_coef adds the likelihood of the chosen answer"),
    "ld_alpha": refused(None, "algorithm.length_normalized divides by lengths"),
    "f_divergence_type": refused("reverse_kl", "leave it out"),
    "use_weighting": refused(False, "leave it out"),
    "f_alpha_divergence_coef": inert(0.5, "for f_divergence_type"),
    "discopop_tau": inert(0.05, "for loss_type discopop"),
}

KTO: dict[str, Alias] = ANSWERS | {
    "beta": key("algorithm.beta", 0.1),
    "desirable_weight": key("algorithm.desirable_weight", 1.0),
    "undesirable_weight": key("algorithm.undesirable_weight", 1.0),
    "loss_type": refused("kto", "leave it out"),
}

REWARD: dict[str, Alias] = ANSWERS | {
    "learning_rate": key("training.lr", 1e-4),
    "center_rewards_coefficient": refused(
        None, "leave it out: group-relative methods ignore a constant offset"
    ),
    "chat_template_path": refused(None, "set tokenizer.chat_template"),
    "eos_token": refused(None, "set tokenizer.eos_token"),
}

SFT: dict[str, Alias] = ANSWERS | {
    "learning_rate": key("training.lr", 2e-5),
    "shuffle_dataset": key("data.shuffle", False),
    "assistant_only_loss": joint(
        False, "`algorithm.learn=assistant`, which rl4llm always uses; TRL's False trains on prompts too"
    ),
    "completion_only_loss": joint(
        None, "the same, for rows of prompt and completion, for which it is TRL's default"
    ),
    "dataset_text_field": refused("text", "rename the column of texts to `text`"),
    "dataset_kwargs": refused(None, "leave it out"),
    "loss_type": Alias("key", "nll", "no key: nll, and its equal chunked_nll", _likelihood),
    "chat_template_path": refused(None, "set tokenizer.chat_template"),
    "eos_token": refused(None, "set tokenizer.eos_token"),
    "packing": inert(False, "sequence packing is always on, and does not change the gradient"),
    "packing_strategy": inert("bfd", "sequence packing is always on"),
    "eval_packing": inert(None, "sequence packing is always on"),
}

CONSTRUCTOR: dict[str, Alias] = {
    "train_dataset": joint(
        None, "`dataset`; a column `prompt` of strings is used unchanged, without the chat template"
    ),
    "reward_funcs": joint(
        None,
        "`reward_functions`, called as TRL calls them. A result of None is left out. 'sandbox' is the reward `code`; "
        "classifiers (`...ForSequenceClassification`) give their logit",
    ),
    "processing_class": joint(None, "`tokenizer`"),
    "args": joint(None, "a config of the same name, from `rl4llm` instead of `trl`, with TRL's defaults"),
    "peft_config": Alias("key", None, "`model.lora`: `r`, `lora_alpha`, `target_modules`", _lora),
    "ref_model": joint(None, f"only a copy of the model: {REFERENCE}"),
    "reward_processing_classes": refused(None, "use a reward model of rl4llm with the reward 'reward_model'"),
    "compute_metrics": refused(None, "use rewards with weight 0, which are only logged"),
    "callbacks": refused(None, "metrics.jsonl has every step; for a custom loop see examples/custom_loop.py"),
    "optimizers": refused((None, None), "training has lr, betas, weight_decay and schedule"),
    "optimizer_cls_and_kwargs": refused(None, "training has lr, betas, weight_decay and schedule"),
    "tools": joint(None, "tools of the environment `tool`, whose errors the model sees"),
    "rollout_func": refused(None, "env=YourEnv, a subclass of BaseMDPEnv"),
    "environment_factory": joint(
        None,
        "an environment `tool` with an object of each episode: `reset(**row)` adds to the prompt, its other public methods "
        "are the tools, and rewards get `environments`",
    ),
    "formatting_func": refused(None, "format the rows first"),
    "data_collator": refused(None, "leave it out"),
    "quantization_config": refused(None, "leave it out: rl4llm does not train quantized weights"),
}
"""Arguments of TRL's trainers beside their config."""

TABLES: dict[str, dict[str, Alias]] = {
    "grpo": GRPO, "rloo": RLOO, "ppo": PPO, "dapo": EPISODES, "dpo": DPO, "kto": KTO, "reward_model": REWARD, "sft": SFT,
}  # fmt: skip
"""By the trainer's algorithm; a method that TRL has no trainer for has the names of EPISODES."""
