"""The configuration keys of michaelnny/rl4llm. Those of a method are in the section of its name, such as `grpo`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.migration.row import (
    DataFacts,
    JointRule,
    Keys,
    Project,
    Row,
    at_least_zero,
    each,
    joint,
    key,
    none,
)

Values = Mapping[str, Any]
METHODS = {
    "grpo": "grpo", "grpo_config": "grpo", "ppo": "ppo", "ppo_config": "ppo", "dapo": "dapo", "dapo_grpo": "dapo",
    "explore_grpo": "explore_grpo", "extended_grpo": "grpo", "discount_grpo": "grpo", "grpo_tools": "grpo",
    "value_net": "ppo", "value_net_config": "ppo",
}  # fmt: skip
DATASETS = {
    "gsm": {
        "data.path": "openai/gsm8k:main",
        "data.prompt_column": "question",
        "data.answer_column": "answer",
        "data.answer_pattern": r"####\s*(.+)",
    },
    "math": {
        "data.path": "EleutherAI/hendrycks_math:algebra",
        "data.prompt_column": "problem",
        "data.answer_column": "solution",
        "data.answer_pattern": r"\\boxed\{(.+)\}",
    },
}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
PROMPT = (
    "Please first think about the reasoning process step by step, and put your final answer within \\boxed{}."
)


def prepare(values: Values) -> dict[str, Any]:
    """Return the values with one name, `method`, for the section of any method; its own name is `method.name`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        section, dot, rest = name.partition(".")
        if dot and section in METHODS:
            found |= {"method.name": section, f"method.{rest}": value}
        else:
            found[name] = value
    return found


def _method(values: Values, facts: DataFacts) -> Keys:
    name = METHODS[values["method.name"]]
    return {"algorithm.name": "explore_grpo" if name == "grpo" and _explores(values) else name}


def _explores(values: Values) -> bool:
    """Return whether a file of grpo is one of explore_grpo, whose section has the same name."""
    explored = any(name.startswith("method.explore_") for name in values)
    return explored or bool(values.get("method.group_temperature"))


def _batches(values: Values, facts: DataFacts) -> Keys:
    group = int(values.get("method.group_size", 8))
    samples = values.get("method.train_rollout_size", values.get("method.rollout_size"))
    if samples is None:
        return {}
    ranks = int(values.get("launch.nproc", 1))
    keys: Keys = {"rollout.prompts": max(1, math.ceil(int(samples) / group / ranks))}
    if batch := values.get("method.train_batch_size"):
        keys["training.updates_per_rollout"] = max(1, round(int(samples) / int(batch)))
    return keys


def _clipping(values: Values, facts: DataFacts) -> Keys:
    both = values.get("method.clip_eps", 0.2)
    low, high = values.get("method.clip_eps_low", both), values.get("method.clip_eps_high", both)
    return {"algorithm.clip_low": low, "algorithm.clip_high": high}


def _critic(values: Values, facts: DataFacts) -> Keys:
    if METHODS[values["method.name"]] != "ppo":
        return {}
    names = {
        "gamma": "gamma",
        "gae_lambda": "lam",
        "value_clip_eps": "value_clip",
        "value_num_updates": "critic_epochs",
    }
    keys = {f"algorithm.{ours}": values.get(f"method.{name}") for name, ours in names.items()}
    path = values.get("value_model.checkpoint_path") or values.get("value_model.pretrained_model")
    return {
        name: value for name, value in (keys | {"algorithm.critic_path": path}).items() if value is not None
    }


def _critic_alone(values: Values, facts: DataFacts) -> Keys:
    """Return the keys of a run that trains a value model: its returns are not bootstrapped, its loss is not clipped."""
    if not values["method.name"].startswith("value_net"):
        return {}
    steps = values.get("method.max_steps", 1)  # without it, one rollout is learned from
    keys: Keys = {
        "max_steps": steps,
        "algorithm.critic_warmup_steps": steps,
        "algorithm.critic_epochs": values.get("method.num_epochs", 1),
        "algorithm.lam": 1.0,
        "algorithm.value_clip": None,
    }
    path = values.get("value_model.pretrained_model")
    return keys | ({"model.path": path} if path and "policy_model.pretrained_model" not in values else {})


def _exploring(values: Values, facts: DataFacts) -> Keys:
    if not _explores(values):
        return {}
    count = max(2, int(values.get("method.group_size", 8)))
    ladders = {"temperatures": ("temperature", 0.6, 1.0), "top_ps": ("top_p", None, 1.0)}
    keys: Keys = {}
    for ours, (name, lowest, highest) in ladders.items():
        low, high = values.get(f"method.min_{name}", lowest), values.get(f"method.max_{name}", highest)
        if low is not None:
            keys[f"algorithm.{ours}"] = [round(low + (high - low) * i / (count - 1), 2) for i in range(count)]
    return keys


def _rewards(values: Values, facts: DataFacts) -> Keys:
    rewards: list[Any] = ["math"]
    if values.get("method.length_max"):
        limit = {"max_length": values["method.length_max"], "buffer": values.get("method.length_cache", 128)}
        rewards.append({"name": "overlong"} | limit)
    if any(name.startswith("env_tool_config.") for name in values):
        rewards.append(
            {"name": "tool_use", "weight": values.get("env_tool_config.tool_call_success_bonus", 0.5)}
        )
    return {"rewards": rewards}


def _tools(values: Values, facts: DataFacts) -> Keys:
    keys: Keys = {"env.name": "tool", "env.tools": ["python"]}
    if steps := values.get("env_tool_config.env_max_steps"):
        keys["env.max_steps"] = steps
    return keys


def _datasets(names: Any) -> Keys:
    first = names[0] if isinstance(names, list) and names else names
    return dict(DATASETS.get(str(first).removesuffix("8k"), {"data.path": str(first)}))


def _precision(on: Any) -> Keys:
    return {"model.autocast": "bfloat16" if on else "none"}


def _schedule(name: Any) -> Keys:
    if name not in SCHEDULES:
        raise ConfigError(f"scheduler.type={name} has no counterpart. Accepted: {', '.join(SCHEDULES)}.")
    return {"training.schedule": SCHEDULES[name]}


def _on_cpu(device: Any) -> bool:
    return bool(device == "cpu")


def _url(values: Values, facts: DataFacts) -> Keys:
    if not values.get("--use-infer-server"):
        return {}
    host, port = values.get("--infer-host", "localhost"), values.get("--infer-port", 30000)
    keys: Keys = {"inference.name": "sglang", "inference.url": f"http://{host}:{port}"}
    return keys | ({"inference.cohost": True} if values.get("--infer-cohost-mode") else {})


QUANTIZED = none("rl4llm does not train quantized weights")
ATTENTION = none("rl4llm chooses the attention, from the kernels that torch brings")
CONTEXT = none("the context is that of the model")
HELD_OUT = none("the held-out set is measured as a whole; `eval.limit` shortens it")
LADDERS = none("explore_grpo draws samples of a group at `algorithm.temperatures` and `top_ps`")
OWN_METHOD = {
    "max_steps": key("max_steps"),
    **each(joint("`rollout.prompts`", "samples / `group_size` / processes"), "train_rollout_size", "rollout_size"),
    "train_batch_size": joint("`training.updates_per_rollout`", "the samples of a rollout divided by it"),
    **each(none("`training.max_tokens_per_batch` cuts micro-batches by tokens"), "train_micro_batch_size", "batch_size",
           "gradient_accumulate_steps"),
    **each(key("training.epochs"), "num_updates", "policy_num_updates"),
    "num_epochs": joint("`algorithm.critic_epochs`", "of value_net_config, whose samples are one rollout"),
    "value_num_updates": joint("`algorithm.critic_epochs`", "of ppo"),
    **each(joint("`algorithm.gamma`, `lam`, `value_clip`", "of ppo; grpo has no discount"), "gamma", "gae_lambda",
           "value_clip_eps"),
    **each(joint("`algorithm.clip_low`, `clip_high`"), "clip_eps", "clip_eps_low", "clip_eps_high"),
    "normalize_advantages": key("algorithm.whiten", bool),
    "normalize_group_rewards": key("algorithm.scale_rewards", lambda on: "group" if on else "none", "group or none"),
    "normalize_rewards": none("`algorithm.whiten` scales advantages"),
    "kl_loss_coef": Row("`algorithm.kl_coef`, with `kl_in=loss`", "",
                        lambda value: {"algorithm.kl_coef": value, "algorithm.kl_in": "loss"}),
    "entropy_loss_coef": key("algorithm.entropy_coef"),
    "sync_reference_interval": key("algorithm.reference_every"),
    "clip_grad_norm": key("training.max_grad_norm"),
    "group_size": key("rollout.group_size"),
    **each(key("rollout.max_tokens", note="of each turn"), "max_completion_tokens", "max_new_tokens"),
    "temperature": key("rollout.temperature"),
    "top_p": key("rollout.top_p"),
    "top_k": key("rollout.top_k", at_least_zero, "-1 is 0"),
    "repetition_penalty": none("log-probs would not be the policy's; `repetition` is a reward"),
    **each(none("a prompt that leaves no room for an answer is refused; `data.bad_rows=skip` drops it"),
           "max_prompt_tokens", "max_prompt_length"),
    "system_prompt": key("data.system_prompt"),
    "xml_format": none("`rewards: [format]` checks think and answer tags"),
    **each(joint("`rewards`", "the reward `overlong`: `max_length`, `buffer`"), "length_max", "length_cache"),
    **each(joint("`algorithm.temperatures`, `top_ps`", "of explore_grpo, from the lowest to the highest"),
           *(f"{bound}_{name}" for name in ("temperature", "top_p") for bound in ("group", "min", "max"))),
    "filter_low_reward_std": key("algorithm.filter_groups", bool),
    **each(none("the discount of a turn is `algorithm.turn_discount`; a length penalty is a reward"), "dynamic_discount",
           "gamma_min", "gamma_max", "min_gamma", "max_gamma", "max_completion_length"),
    **each(none("bounds are constant"), "clip_eps_min", "clip_eps_max"),
    **each(LADDERS, "explore_*", "random_start_*", "replace_*", "continue_*"),
    **each(HELD_OUT, "eval_rollout_size", "eval_batch_size"),
    "eval_interval": key("eval.every"),
    "checkpoint_interval": key("checkpoint.every"),
}  # fmt: skip
"""Keys of a method's section."""

DEEPSPEED = {
    "optimizer.params.lr": key("training.lr"),
    "optimizer.params.betas": key("training.betas"),
    "optimizer.params.weight_decay": key("training.weight_decay"),
    "optimizer.*": none("the optimizer is AdamW with eps 1e-8"),
    "gradient_clipping": key("training.max_grad_norm", note="0 never clips"),
    "bf16.enabled": Row("`model.autocast`", "bfloat16 or none", _precision),
    "zero_optimization.stage": Row(
        "`backend.zero_stage`", "with `backend.name=deepspeed`",
        lambda stage: {"backend.name": "deepspeed", "backend.zero_stage": stage}),
    **{f"zero_optimization.offload_{what}.device": key(f"backend.offload_{what}", _on_cpu)
       for what in ("optimizer", "param")},
    "scheduler.type": Row("`training.schedule`", "after the warm-up, until the run ends", _schedule),
    "scheduler.params.warmup_num_steps": key("training.warmup_steps", int),
    "scheduler.params.warmup_max_lr": key("training.lr"),
    "scheduler.*": none("the warm-up begins at lr / `training.warmup_steps`, and the schedule ends with the run"),
    "*": none("`backend.config=FILE` passes a whole DeepSpeed file"),
}  # fmt: skip
"""Keys of DeepSpeed's section for the policy."""

ROWS: dict[str, Row] = {
    **each(key("seed"), "seed", "job.seed"),
    **each(key("output.dir"), "logging.output_dir", "log_config.output_dir", "job.artifacts_path"),
    "logging.enable_tensorboard": key("tracking.tensorboard"),
    **each(none("every episode is stored as JSONL; `tracking.episodes_per_step` limits them"),
           "logging.sample_buffer_size", "logging.sample_file_format"),
    "logging.log_level": none("`output.console` is auto, plain, quiet or verbose; `--debug` shows tracebacks"),
    "logging.metrics_aggregation_config.*": none("each metric is the mean over the step; episodes have single values"),
    **each(Row("`data.path`", "gsm is openai/gsm8k:main; others by file or hub name, or `parts`", _datasets),
           "dataset.names", "job.datasets"),
    **each(key("data.limit"), "dataset.max_train_samples", "job.max_train_samples"),
    **each(key("eval.limit"), "dataset.max_test_samples", "job.max_test_samples"),
    **each(key("model.path"), "model.pretrained_model", "policy_model.pretrained_model"),
    **each(joint("`algorithm.critic_path`"), "value_model.pretrained_model", "value_model.checkpoint_path"),
    **each(key("model.gradient_checkpointing"), "model.gradient_checkpointing", "policy_model.gradient_checkpointing"),
    **each(QUANTIZED, "model.load_in_4bit", "policy_model.load_in_4bit"),
    **each(ATTENTION, "model.flash_attention", "policy_model.flash_attention"),
    **each(CONTEXT, "model.model_max_length", "policy_model.model_max_length"),
    "value_model.*": none("the critic shares the settings of `model`"),
    **{f"method.{name}": row for name, row in OWN_METHOD.items()},
    "method.name": joint("`algorithm.name`", "the section of the method names it"),
    "env_tool_config.env_max_steps": joint("`env.max_steps`", "with `env.name=tool`"),
    "env_tool_config.tool_call_success_bonus": joint("`rewards`", "the weight of the reward `tool_use`"),
    "env_tool_config.*": none("the reward `tool_use` counts calls that worked; calls have no costs"),
    **{f"{section}.{name}": row for section in ("deepspeed", "policy_deepspeed") for name, row in DEEPSPEED.items()},
    **{name: row for name, row in DEEPSPEED.items() if name.startswith(("optimizer.", "scheduler."))},
    "value_deepspeed.optimizer.params.lr": key("algorithm.critic_lr"),
    "value_deepspeed.*": none("the critic shares the settings of `training` and `backend`"),
    "reference_deepspeed.*": none("the reference is in the backend of the policy"),
    **each(joint("`inference.name=sglang`, `inference.url`, `inference.cohost`"), "--use-infer-server", "--infer-host",
           "--infer-port", "--infer-cohost-mode"),
    "launch.nproc": key("launch.nproc", note="`rl4llm launch CONFIG --nproc N`"),
}  # fmt: skip

RULES = (
    JointRule(("method.name",), _method),
    JointRule(("method.train_rollout_size", "method.rollout_size", "method.train_batch_size"), _batches),
    JointRule(("method.clip_eps", "method.clip_eps_low", "method.clip_eps_high"), _clipping),
    JointRule(
        (
            *("method.gamma", "method.gae_lambda", "method.value_clip_eps", "method.value_num_updates"),
            *("value_model.pretrained_model", "value_model.checkpoint_path"),
        ),
        _critic,
    ),
    JointRule(("method.name", "method.num_epochs", "value_model.pretrained_model"), _critic_alone),
    JointRule(
        tuple(
            f"method.{bound}_{name}" for name in ("temperature", "top_p") for bound in ("group", "min", "max")
        ),
        _exploring,
    ),
    JointRule(
        (
            *("method.name", "method.length_max", "method.length_cache"),
            "env_tool_config.tool_call_success_bonus",
        ),
        _rewards,
    ),
    JointRule(("env_tool_config.env_max_steps",), _tools),
    JointRule(("--use-infer-server", "--infer-host", "--infer-port", "--infer-cohost-mode"), _url),
)

ORIGINAL = Project(
    "michaelnny/rl4llm",
    ROWS,
    RULES,
    base={"data.system_prompt": PROMPT, "training.max_tokens_per_batch": 8192},
    prepare=prepare,
)
