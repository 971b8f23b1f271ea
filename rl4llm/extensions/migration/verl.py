"""The configuration keys of verl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.migration.row import Keys, Project, Row, at_least_zero, each, joint, key, none
from rl4llm.extensions.migration.verl_rules import RULES

A, M, R, F = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout", "ref"))

SERVER = none("an option of the server: pass it to `rl4llm serve`")
CHOSEN = none("it affects only speed or memory, and rl4llm chooses it")
OTHERS = none("rl4llm has no such option")
MEGATRON = none("rl4llm has no Megatron backend; `backend.name` is torch (FSDP2) or deepspeed")
SIZES = none("`training.max_tokens_per_batch` cuts micro-batches by tokens")
CRITIC = none("the critic shares `training`, except `algorithm.critic_lr` and `critic_path`")
PROFILER = none("use torch's or NVIDIA's profiler on `rl4llm train`")
IMAGES = none("prompts with images are not supported")
RESUMES = none("the same command resumes from the last checkpoint")
JUDGED = none("the reward `reward_model` loads a model that rl4llm trained, by its `path`")


def _logger(value: Any) -> Keys:
    names = [value] if isinstance(value, str) else list(value or ())
    return {f"tracking.{name}": True for name in names if name in ("wandb", "tensorboard")}


def _file(value: Any) -> str:
    """Return the first file: rl4llm reads one path, or `parts` with one each."""
    return str(Path(str(value[0] if isinstance(value, list) else value)).expanduser())


def _backend(value: Any) -> Keys:
    if value not in ("fsdp", "fsdp2"):
        raise ConfigError(f"{A}.strategy={value} has no counterpart. Accepted: fsdp, fsdp2.")
    return {"backend.name": "torch", "backend.shard": "fsdp2"}


ONE_FILE = "the first file of a list; concatenate files, or give each a part in `parts`"
ROWS: dict[str, Row] = {
    "data.train_files": key("data.path", _file, ONE_FILE),
    "data.val_files": key("eval.path", _file, ONE_FILE),
    "data.train_max_samples": Row("`data.limit`", "-1 is null", lambda n: {"data.limit": n if n and n > 0 else None}),
    "data.val_max_samples": Row("`eval.limit`", "-1 is null", lambda n: {"eval.limit": n if n and n > 0 else None}),
    "data.prompt_key": key("data.prompt_column", note="the column may hold messages"),
    "data.reward_fn_key": none("verl chooses a grader by this column; here `rewards` names them"),
    "data.train_batch_size": joint("`rollout.prompts`", "global there, per process here: divided by the number of GPUs"),
    "data.gen_batch_size": none("`algorithm.resampling_rounds` of dapo draws as many prompts as a step lacks"),
    "data.val_batch_size": none("the held-out set is measured as a whole"),
    "data.max_response_length": key("rollout.max_tokens", note="of each turn"),
    "data.max_prompt_length": none("the context of the model limits a prompt together with its answer"),
    "data.filter_overlong_prompts": Row("`data.bad_rows`", "skip or stop",
                                        lambda drop: {"data.bad_rows": "skip" if drop else "stop"}),
    "data.filter_overlong_prompts_workers": CHOSEN,
    "data.truncation": none("prompts are never truncated; `data.bad_rows` says what happens to long ones"),
    "data.shuffle": key("data.shuffle"),
    "data.seed": none("every random choice derives from `seed`"),
    **each(none("chat templates are always applied to messages"), "data.return_raw_chat", "data.return_raw_input_ids",
           "data.return_full_prompt"),
    **each(CHOSEN, "data.dataloader_num_workers", "data.use_shm", "data.validation_shuffle"),
    **each(IMAGES, "data.image_key", "data.video_key", "data.image_patch_size", "data.return_multi_modal_inputs"),
    "data.tokenizer": none("the tokenizer is that of `model.path`"),
    **each(none("load the model yourself, and use the Python API"), "data.trust_remote_code", f"{M}.trust_remote_code",
           "critic.model.trust_remote_code"),
    **each(none("use the Python API: a trainer takes rows"), "data.custom_cls.*", "data.datagen.*"),
    "data.sampler.*": none("`curriculum` draws prompts that are solved half of the time more often"),
    "data.apply_chat_template_kwargs.*": Row("`env.template_args`", "a mapping"),
    "data.tool_config_path": none("`env.name=tool` with `env.tools`, a list of registered tools"),
    f"{M}.path": key("model.path", lambda value: str(Path(str(value)).expanduser())),
    f"{M}.enable_gradient_checkpointing": key("model.gradient_checkpointing"),
    **each(joint("`model.lora`", "rank, alpha and targets"), f"{M}.lora_rank", f"{M}.lora_alpha", f"{M}.target_modules",
           f"{M}.lora.rank", f"{M}.lora.alpha", f"{M}.lora.target_modules"),
    f"{M}.lora.*": none("an adapter has `rank`, `alpha` and `targets`; `rl4llm export` merges it"),
    f"{M}.lora_adapter_path": none("merge the adapter into the model first"),
    f"{M}.exclude_modules": none("`model.lora.targets` names the layers that have an adapter"),
    f"{M}.use_remove_padding": none("sequence packing is always on"),
    **each(CHOSEN, f"{M}.use_shm", f"{M}.use_liger", f"{M}.use_fused_kernels", f"{M}.fused_kernel_options.*",
           f"{M}.enable_activation_offload", f"{M}.torch_dtype", f"{M}.tiled_mlp.*"),
    **each(none("change the config.json of the model"), f"{M}.override_config.*", f"{M}.hf_config_path"),
    f"{M}.tokenizer_path": none("save the tokenizer in the directory of the model"),
    f"{M}.custom_chat_template": none("save the template with the tokenizer of the model"),
    f"{M}.external_lib": none("`package.module:Name` as a name imports your module"),
    f"{M}.mtp.*": none("rl4llm has no multi-token prediction"),
    f"{A}.strategy": Row("`backend.shard`", "fsdp and fsdp2 are fsdp2", _backend),
    f"{A}.optim.lr": key("training.lr"),
    **each(joint("`training.warmup_steps`", "a ratio is of all optimizer steps"), f"{A}.optim.lr_warmup_steps",
           f"{A}.optim.lr_warmup_steps_ratio"),
    **each(Row("`training.schedule`", "constant or cosine", lambda kind: {"training.schedule": kind} if kind else {}),
           f"{A}.optim.lr_scheduler_type", f"{A}.optim.warmup_style", f"{A}.optim.lr_decay_style"),
    f"{A}.optim.weight_decay": key("training.weight_decay"),
    f"{A}.optim.betas": key("training.betas"),
    **each(key("training.max_grad_norm"), f"{A}.grad_clip", f"{A}.optim.clip_grad"),
    f"{A}.optim.*": none("the optimizer is AdamW with lr, betas, weight_decay, schedule and warmup_steps"),
    f"{A}.ppo_mini_batch_size": joint("`training.updates_per_rollout`", "`data.train_batch_size` divided by it"),
    f"{A}.ppo_epochs": key("training.epochs"),
    **each(SIZES, f"{A}.ppo_micro_batch_size", f"{A}.ppo_micro_batch_size_per_gpu",
           f"{R}.log_prob_micro_batch_size", f"{R}.log_prob_micro_batch_size_per_gpu", f"{R}.log_prob_use_dynamic_bsz",
           f"{R}.log_prob_max_token_len_per_gpu", f"{F}.log_prob_micro_batch_size",
           f"{F}.log_prob_micro_batch_size_per_gpu", f"{F}.log_prob_use_dynamic_bsz",
           f"{F}.log_prob_max_token_len_per_gpu"),
    f"{A}.ppo_max_token_len_per_gpu": key("training.max_tokens_per_batch"),
    f"{A}.use_dynamic_bsz": none("micro-batches are always cut by tokens"),
    **each(joint("`algorithm.clip_low`, `clip_high`"), f"{A}.clip_ratio", f"{A}.clip_ratio_low",
           f"{A}.clip_ratio_high"),
    f"{A}.clip_ratio_c": joint("`algorithm.dual_clip`", "verl's default is 3, ours is none"),
    f"{A}.loss_agg_mode": joint("`algorithm.aggregation`", "token-mean is token, seq-mean-token-mean is sequence, "
                                "seq-mean-token-sum-norm is constant; seq-mean-token-sum has no counterpart"),
    f"{A}.loss_scale_factor": joint("`training.constant_length`"),
    **each(joint("`algorithm.kl_coef` with `kl_in=loss`", "`kl_estimator`: low_var_kl is k3, kl is k1, mse is k2"),
           f"{A}.use_kl_loss", f"{A}.kl_loss_coef", f"{A}.kl_loss_type"),
    f"{A}.entropy_coeff": key("algorithm.entropy_coef"),
    f"{A}.policy_loss.loss_mode": joint("`algorithm.name`", "gspo, sapo, cispo; geo_mean is gmpo"),
    f"{A}.policy_loss.*": none("options of losses without a counterpart"),
    **each(joint("`algorithm.tau_positive`, `tau_negative` of sapo"), f"{A}.tau_pos", f"{A}.tau_neg"),
    f"{A}.calculate_entropy": none("the entropy of sampled tokens is always logged"),
    **each(none("rl4llm shards with FSDP2 or ZeRO: `backend.shard`, `backend.zero_stage`; `inference.cohost` offloads"),
           f"{A}.fsdp_config.*", f"{F}.fsdp_config.*", "critic.model.fsdp_config.*", f"{A}.fsdp_size", f"{F}.strategy",
           "critic.strategy"),
    **each(none("a sequence is not split over GPUs"), f"{A}.ulysses_sequence_parallel_size",
           f"{F}.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size"),
    **each(MEGATRON, f"{A}.megatron.*", f"{F}.megatron.*", "critic.megatron.*"),
    f"{A}.checkpoint.*": none("a checkpoint has all that the same steps need; `rl4llm export` writes the model"),
    **each(PROFILER, f"{A}.profiler.*", f"{F}.profiler.*", f"{R}.profiler.*", "critic.profiler.*", "global_profiler.*"),
    f"{A}.freeze_vision_tower": IMAGES,
    f"{A}.shuffle": none("groups are distributed over optimizer steps by `seed`"),
    f"{A}.data_loader_seed": none("every random choice derives from `seed`"),
    f"{A}.router_replay.*": none("experts that the engine chose are not replayed; the log-prob parity check measures it"),
    **each(CHOSEN, f"{A}.use_torch_compile", f"{A}.entropy_checkpointing", f"{A}.entropy_from_logits_with_chunking",
           f"{A}.use_fused_kernels", f"{A}.use_remove_padding", f"{A}.use_prefix_grouper"),
    f"{A}.rollout_n": none("`rollout.group_size` is for all of a run"),
    f"{A}.*": OTHERS,
    f"{F}.*": none("the reference is the initial policy, in the backend of the policy"),
    f"{R}.name": joint("`inference.name`", "vllm or sglang, with `inference.url` of a server that you start"),
    f"{R}.n": key("rollout.group_size"),
    f"{R}.temperature": key("rollout.temperature"),
    f"{R}.top_p": key("rollout.top_p"),
    f"{R}.top_k": key("rollout.top_k", at_least_zero, "-1 is 0"),
    f"{R}.do_sample": none("`rollout.temperature` is above 0 in training"),
    f"{R}.val_kwargs.temperature": key("eval.temperature"),
    f"{R}.val_kwargs.n": none("`rl4llm eval --samples N` draws several answers"),
    f"{R}.val_kwargs.*": none("a held-out prompt is answered once, at `eval.temperature`"),
    f"{R}.response_length": key("rollout.max_tokens"),
    f"{R}.prompt_length": none("the context of the model limits a prompt together with its answer"),
    f"{R}.multi_turn.max_assistant_turns": Row(
        "`env.max_steps`", "with `env.name=tool` or a custom environment", lambda n: {"env.max_steps": n} if n else {}),
    f"{R}.multi_turn.*": none("`env.name=tool` with `env.tools`, or a custom environment"),
    f"{R}.agent.*": none("`env.name=agent` runs a program, or a custom environment"),
    f"{R}.calculate_log_probs": none("log-probs are always sampled with the tokens, and compared with the trainer's"),
    **each(none("the weights of a version are files, or tensors: `sync.name`"), f"{R}.checkpoint_engine.*",
           f"{R}.load_format", f"{R}.layered_summon", f"{R}.multi_stage_wake_up"),
    **each(none("`inference.cohost`, which shares the GPU with a server"), f"{R}.free_cache_engine",
           "actor_rollout_ref.hybrid_engine"),
    f"{R}.over_sample_rate": none("every episode of a step is finished"),
    f"{R}.trace.*": none("every episode is stored; `rl4llm view` shows them"),
    f"{R}.*": SERVER,
    "actor_rollout_ref.nccl_timeout": key("timeout_s"),
    **each(joint("`algorithm.critic_path`, `critic_lr`"), "critic.model.path", "critic.optim.lr"),
    "critic.cliprange_value": joint("`algorithm.value_clip`"),
    "critic.ppo_epochs": joint("`algorithm.critic_epochs`"),
    "critic.*": CRITIC,
    "algorithm.adv_estimator": joint("`algorithm.name`", "gae is ppo, reinforce_plus_plus is reinforce_pp, and "
                                     "grpo, rloo and remax keep their names; opo, gpg, gdpo, grpo_passk and "
                                     "optimal_token_baseline have no counterpart"),
    **each(joint("`algorithm.gamma`, `lam`"), "algorithm.gamma", "algorithm.lam"),
    "algorithm.norm_adv_by_std_in_grpo": joint("`algorithm.scale_rewards`", "group or none"),
    **each(joint("`algorithm.kl_coef` with `kl_in=reward`", "`kl_target` and `kl_horizon` adapt it"),
           "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "algorithm.kl_ctrl.*"),
    "algorithm.filter_groups.enable": joint("`algorithm.name=dapo`", "dynamic sampling: `filter_groups`"),
    "algorithm.filter_groups.max_num_gen_batches": key("algorithm.resampling_rounds", at_least_zero, "of dapo"),
    "algorithm.filter_groups.metric": none("`algorithm.filter_groups_by` names a reward; null is the total"),
    "algorithm.rollout_correction.*": none("`algorithm.correction` with `correction_low` and `correction_high`"),
    **each(none("rl4llm has no PF-PPO"), "algorithm.use_pf_ppo", "algorithm.pf_ppo.*"),
    **each(joint("`rewards`", "the reward `compute_score` calls the function unchanged"), "custom_reward_function.path",
           "custom_reward_function.name", "reward.custom_reward_function.path", "reward.custom_reward_function.name"),
    **each(joint("`rewards`", "the reward `reward_model`"), "reward_model.enable", "reward.reward_model.enable"),
    **each(none("`rewards` names what scores an answer"), "reward_model.reward_manager", "reward.reward_manager.*",
           "reward_manager.*", "reward_model.use_reward_loop", "reward_model.launch_reward_fn_async"),
    **each(joint("`rewards`", "the reward `overlong`: `max_length`, `buffer`, `factor`"),
           "reward_model.reward_kwargs.*", "reward.reward_kwargs.*"),
    **each(none("programs run in the sandbox of this machine, see the section `sandbox`"),
           "reward_model.sandbox_fusion.*", "reward.sandbox_fusion.*"),
    **each(JUDGED, "reward_model.*", "reward.*"),
    "trainer.total_epochs": joint("`max_steps`", "rows x epochs / (`rollout.prompts` x processes)"),
    "trainer.total_training_steps": joint("`max_steps`"),
    "trainer.save_freq": key("checkpoint.every", at_least_zero, "-1 is 0"),
    "trainer.test_freq": key("eval.every", at_least_zero, "-1 is 0"),
    "trainer.val_before_train": none("the held-out set is always measured at the start"),
    "trainer.val_only": none("`rl4llm eval CONFIG`"),
    **each(joint("`output.dir`", "the directory names the run"), "trainer.default_local_dir", "trainer.experiment_name"),
    "trainer.project_name": key("tracking.project"),
    "trainer.logger": Row("`tracking`", "true for wandb and tensorboard in it; the console is always on", _logger),
    "trainer.log_val_generations": none("every episode is stored; `rl4llm view` shows them"),
    **each(none("every episode is stored in the run's directory"), "trainer.rollout_data_dir",
           "trainer.validation_data_dir"),
    "trainer.n_gpus_per_node": key("launch.nproc", note="`rl4llm launch CONFIG --nproc N`"),
    "trainer.nnodes": key("launch.nodes", note="`rl4llm launch CONFIG --on LAUNCHER`"),
    "trainer.critic_warmup": joint("`algorithm.critic_warmup_steps`"),
    **each(RESUMES, "trainer.resume_mode", "trainer.resume_from_path", "trainer.del_local_ckpt_after_load"),
    "trainer.max_actor_ckpt_to_keep": Row("`checkpoint.keep`", "", lambda n: {"checkpoint.keep": n} if n else {}),
    "trainer.max_critic_ckpt_to_keep": none("the critic is in the checkpoint of the policy"),
    "trainer.device": key("model.device"),
    "trainer.balance_batch": none("sequence packing balances micro-batches"),
    **each(CHOSEN, "trainer.use_legacy_worker_impl", "trainer.esi_redundant_time",
           "trainer.ray_wait_register_center_timeout"),
    "trainer.*": OTHERS,
    **each(none("rl4llm needs no Ray; `examples/clusters/ray_job.py` starts on one"), "ray_kwargs.*", "ray_init.*"),
    "transfer_queue.*": CHOSEN,
}  # fmt: skip


VERL = Project(
    "verl",
    ROWS,
    RULES,
    defaults={
        "data.train_batch_size": 1024, "data.max_response_length": 512, "data.prompt_key": "prompt",
        f"{A}.ppo_mini_batch_size": 256, f"{A}.loss_agg_mode": "token-mean", f"{A}.clip_ratio": 0.2,
        f"{A}.clip_ratio_c": 3.0, f"{A}.optim.weight_decay": 0.01, f"{A}.optim.betas": [0.9, 0.999],
        f"{A}.use_kl_loss": False, f"{A}.optim.lr": 1e-6, f"{R}.n": 1, f"{R}.name": "vllm",
        f"{M}.enable_gradient_checkpointing": True, "algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0, "algorithm.norm_adv_by_std_in_grpo": True, "trainer.total_epochs": 30,
        "trainer.n_gpus_per_node": 8, "trainer.nnodes": 1, "trainer.save_freq": -1, "trainer.test_freq": -1,
        "custom_reward_function.path": None,
    },
    base={"data.answer_column": "reward_model.ground_truth", "model.autocast": "bfloat16",
          "algorithm.old_logprobs": "recomputed"},
)  # fmt: skip
