"""The configuration keys of MRLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.migration.row import (
    Facts,
    Keys,
    Project,
    Row,
    Rule,
    at_least_zero,
    each,
    joint,
    key,
    none,
)

Values = Mapping[str, Any]
ENVIRONMENTS: dict[str, Keys] = {
    "math": {"env.name": "math", "data.path": "arithmetic", "rewards": ["math"]},
    "code": {"env.name": "code", "data.path": "openai_humaneval", "rewards": ["code"]},
    "debate": {"env.name": "debate", "env.frozen": ["con"], "data.path": "arithmetic", "rewards": ["winner"]},
    "tool": {"env.name": "tool", "env.tools": ["calculator"], "data.path": "arithmetic", "rewards": ["math"]},
}
"""What the environments of MRLM are here; their tasks are generated, as those of `arithmetic` are."""

ALGORITHMS = ("ppo", "grpo", "dpo", "sft")
LORA = ("model.use_lora", "model.lora_r", "model.lora_alpha", "model.lora_target_modules")


def _algorithm(values: Values, facts: Facts) -> Keys:
    name = str(values["training.algorithm"]).lower()
    if name not in ALGORITHMS:
        raise ConfigError(f"training.algorithm={name} has no counterpart. Accepted: {', '.join(ALGORITHMS)}.")
    return {"algorithm.name": name}


def _episodes(values: Values) -> Any:
    names = ("num_rollouts_per_iteration", "episodes_per_iteration")
    return next((values[f"training.{name}"] for name in names if values.get(f"training.{name}")), None)


def _batches(values: Values, facts: Facts) -> Keys:
    batch = int(values.get("training.mini_batch_size") or values.get("training.batch_size") or 32)
    episodes = int(_episodes(values) or batch)
    if str(values.get("training.algorithm")).lower() in ("dpo", "sft"):
        return {"rollout.prompts": batch}
    keys: Keys = {"rollout.prompts": max(1, math.ceil(episodes / int(values.get("grpo.group_size", 1))))}
    return keys | {
        "training.updates_per_rollout": min(keys["rollout.prompts"], max(1, round(episodes / batch)))
    }


def _group(values: Values, facts: Facts) -> Keys:
    learns = str(values.get("training.algorithm", "ppo")).lower()
    return {"rollout.group_size": int(values.get("grpo.group_size", 4 if learns == "grpo" else 1))}


def _of_ppo(values: Values, facts: Facts) -> Keys:
    if str(values.get("training.algorithm")).lower() != "ppo":
        return {}
    names = {
        "gamma": "gamma",
        "gae_lambda": "lam",
        "clip_range_vf": "value_clip",
        "normalize_advantages": "whiten",
    }
    return {
        f"algorithm.{ours}": values[f"ppo.{name}"] for name, ours in names.items() if f"ppo.{name}" in values
    }


def _betas(values: Values, facts: Facts) -> Keys:
    return {
        "training.betas": [values.get("training.adam_beta1", 0.9), values.get("training.adam_beta2", 0.999)]
    }


def _precision(values: Values, facts: Facts) -> Keys:
    mixed = (
        values.get("training.use_bf16")
        or values.get("training.use_fp16")
        or "16" in str(values.get("model.torch_dtype"))
    )
    return {"model.autocast": "bfloat16" if mixed else "none"}


def _lora(values: Values, facts: Facts) -> Keys:
    if not values.get("model.use_lora"):
        return {}
    return {
        "model.lora.rank": values.get("model.lora_r", 8),
        "model.lora.alpha": values.get("model.lora_alpha", 16),
        "model.lora.targets": list(values.get("model.lora_target_modules") or ()),
    }


def _environments(value: Any) -> Keys:
    """Return the first environment; several are `parts`."""
    first = dict(value[0] if isinstance(value, list) and value else value or {})
    if first.get("custom_class"):
        module, _, name = str(first["custom_class"]).rpartition(".")
        options = {
            f"env.options.{option}": item for option, item in (first.get("custom_kwargs") or {}).items()
        }
        return {"env.name": "stepped", "env.task": f"{module}:{name}"} | options
    kind = str(first.get("env_type")).removesuffix("s")
    if kind not in ENVIRONMENTS:
        raise ConfigError(f"env_type={kind} has no counterpart. Accepted: {', '.join(ENVIRONMENTS)}.")
    turns = first.get("max_turns") or first.get("max_attempts")
    keys = dict(ENVIRONMENTS[kind])
    if turns and kind in ("code", "tool"):
        keys["env.max_steps"] = turns
    return keys | ({"env.remote": [first["server_address"]]} if first.get("remote") else {})


def _strategy(values: Values, facts: Facts) -> Keys:
    if not values.get("distributed.enabled"):
        return {}
    kind = str(values.get("distributed.strategy", "ddp"))
    keys: Keys = {
        "launch.nproc": values.get("distributed.num_gpus", 1),
        "launch.nodes": values.get("distributed.num_nodes", 1),
    }
    if kind == "deepspeed":
        return keys | {
            "backend.name": "deepspeed",
            "backend.zero_stage": values.get("distributed.zero_stage", 2),
        }
    return keys | {"backend.name": "torch"} | ({"backend.shard": "fsdp2"} if kind == "fsdp" else {})


def _directory(values: Values, facts: Facts) -> Keys:
    name = f"runs/{values.get('experiment_name', 'mrlm')}"
    return {"output.dir": str(values.get("output_dir") or values.get("output.save_dir") or name)}


CLIP = Row(
    "`algorithm.clip_low`, `clip_high`",
    "",
    lambda bound: {"algorithm.clip_low": bound, "algorithm.clip_high": bound},
)
GENERATION = {
    "max_new_tokens": key("rollout.max_tokens", note="of each turn"),
    "temperature": key("rollout.temperature"),
    "top_p": key("rollout.top_p"),
    "top_k": key("rollout.top_k", at_least_zero),
    "do_sample": none("`rollout.temperature` is above 0 in training"),
    **each(none("log-probs would not be the policy's; `repetition` is a reward"), "repetition_penalty"),
    **each(none("an answer is sampled, not searched for"), "num_beams", "length_penalty"),
}
ROWS: dict[str, Row] = {
    **each(joint("`output.dir`"), "experiment_name", "output_dir", "output.save_dir"),
    **each(none("a comment of the file"), "description", "tags"),
    "training.algorithm": joint("`algorithm.name`", "ppo, grpo, dpo, sft"),
    **each(key("max_steps"), "training.num_epochs", "training.num_iterations"),
    **each(joint("`rollout.prompts`, `training.updates_per_rollout`", "episodes of a step, and how many of them an "
                 "optimizer step has"), "training.batch_size", "training.mini_batch_size",
           "training.num_rollouts_per_iteration", "training.episodes_per_iteration"),
    "training.learning_rate": key("training.lr"),
    "training.max_grad_norm": key("training.max_grad_norm"),
    "training.weight_decay": key("training.weight_decay"),
    **each(joint("`training.betas`"), "training.adam_beta1", "training.adam_beta2"),
    **each(none("the optimizer is AdamW with eps 1e-8"), "training.optimizer", "training.adam_epsilon"),
    "training.lr_scheduler": Row("`training.schedule`", "", lambda name: {"training.schedule": name} if name else {}),
    "training.warmup_steps": key("training.warmup_steps"),
    "training.max_episode_length": none("`env.max_steps` limits turns, `rollout.max_tokens` the tokens of each"),
    **each(key("eval.every"), "training.eval_every", "output.eval_interval"),
    "training.eval_episodes": key("eval.limit"),
    **each(key("checkpoint.every"), "training.save_every", "output.save_interval"),
    "training.save_total_limit": Row("`checkpoint.keep`", "", lambda n: {"checkpoint.keep": n} if n else {}),
    **each(none("the run is in `output.dir`, and every step is logged"), "training.checkpoint_dir", "training.log_dir",
           "training.log_every", "output.log_interval"),
    "training.wandb_project": Row("`tracking.wandb`, `tracking.project`", "", lambda name: {
        "tracking.wandb": True, "tracking.project": name} if name else {}),
    **each(none("WANDB_ENTITY and `output.dir` name them"), "training.wandb_entity", "training.wandb_run_name"),
    "training.use_tensorboard": key("tracking.tensorboard"),
    "training.seed": Row("`seed`", "", lambda seed: {} if seed is None else {"seed": seed}),
    **each(joint("`model.autocast`", "bfloat16; there is no fp16"), "training.use_bf16", "training.use_fp16",
           "model.torch_dtype"),
    "training.gradient_accumulation_steps": none("`training.max_tokens_per_batch` cuts micro-batches by tokens"),
    **each(CLIP, "ppo.clip_range", "grpo.clip_range"),
    **each(joint("`algorithm.value_clip`, `gamma`, `lam`, `whiten`", "of ppo"), "ppo.clip_range_vf", "ppo.gamma",
           "ppo.gae_lambda", "ppo.normalize_advantages"),
    **each(key("training.epochs"), "ppo.num_ppo_epochs", "grpo.num_grpo_epochs"),
    **each(key("algorithm.entropy_coef"), "ppo.entropy_coef", "grpo.entropy_coef"),
    **each(none("the critic is a separate model, with `algorithm.critic_lr`"), "ppo.value_loss_coef",
           "grpo.value_loss_coef", "grpo.value_clip_range"),
    **each(none("a step is not cut short; `algorithm.kl_coef` penalizes the distance to the reference"), "ppo.target_kl",
           "grpo.target_kl"),
    "grpo.group_size": joint("`rollout.group_size`"),
    **each(none("grpo has no discount"), "grpo.gamma", "grpo.gae_lambda"),
    "grpo.normalize_rewards": key("algorithm.scale_rewards", lambda on: "group" if on else "none", "group or none"),
    "grpo.reward_normalization": none("rewards are compared within a group"),
    "grpo.temperature": key("rollout.temperature"),
    "dpo.beta": key("algorithm.beta"),
    "dpo.label_smoothing": key("algorithm.label_smoothing"),
    "dpo.loss_type": key("algorithm.loss", note="sigmoid or ipo"),
    "dpo.reference_free": none("the reference is the initial policy"),
    "sft.*": none("`rl4llm collect --filter-reward` filters episodes, `rl4llm sft` learns from them; `algorithm.learn` is "
                  "assistant, context (a world model) or all"),
    "model.model_name_or_path": key("model.path"),
    **each(none("the tokenizer and its type are those of `model.path`"), "model.tokenizer_name_or_path",
           "model.model_type"),
    "model.trust_remote_code": none("load the model yourself, and use the Python API"),
    "model.use_flash_attention": none("rl4llm chooses the attention, from the kernels that torch brings"),
    "model.gradient_checkpointing": key("model.gradient_checkpointing"),
    **each(none("rl4llm does not train quantized weights"), "model.load_in_8bit", "model.load_in_4bit"),
    **each(joint("`model.lora`", "rank, alpha and targets"), *LORA),
    "model.lora_dropout": none("an adapter has no dropout"),
    **{f"model.{name}": row for name, row in GENERATION.items()},
    **{f"model.generation.{name}": row for name, row in GENERATION.items()},
    "model.device": key("model.device"),
    "model.device_map": none("`backend` places the model"),
    "policy_env": none("the policy is `model`"),
    "policy_env.*": none("the policy is `model`"),
    "eval_envs": Row("`env`, `data.path`, `rewards`", "the first one; several environments are `parts`", _environments),
    **each(joint("`backend.name`, `backend.shard`, `launch`", "ddp and fsdp are torch, fsdp with `backend.shard=fsdp2`"),
           *(f"distributed.{name}" for name in ("enabled", "strategy", "num_gpus", "num_nodes", "zero_stage"))),
    "distributed.*": none("`rl4llm launch CONFIG --nproc N`, or torchrun, sets it"),
}  # fmt: skip

RULES = (
    Rule(("training.algorithm",), _algorithm),
    Rule(
        ("training.batch_size", "training.mini_batch_size", "training.num_rollouts_per_iteration",
         "training.episodes_per_iteration"),
        _batches,
    ),
    Rule(("grpo.group_size", "training.algorithm"), _group),
    Rule(("ppo.clip_range_vf", "ppo.gamma", "ppo.gae_lambda", "ppo.normalize_advantages"), _of_ppo),
    Rule(("training.adam_beta1", "training.adam_beta2"), _betas),
    Rule(("training.use_bf16", "training.use_fp16", "model.torch_dtype"), _precision),
    Rule(LORA, _lora),
    Rule(tuple(f"distributed.{name}" for name in ("enabled", "strategy", "num_gpus", "num_nodes", "zero_stage")), _strategy),
    Rule(("experiment_name", "output_dir", "output.save_dir"), _directory),
)  # fmt: skip

DEFAULTS = {
    "training.num_epochs": 100, "training.learning_rate": 3e-4, "training.max_grad_norm": 0.5,
    "training.weight_decay": 0.01, "training.adam_beta1": 0.9, "training.adam_beta2": 0.999, "model.top_p": 0.9,
    "model.top_k": 50,
}  # fmt: skip

MRLM = Project("MRLM", ROWS, RULES, defaults=DEFAULTS)
