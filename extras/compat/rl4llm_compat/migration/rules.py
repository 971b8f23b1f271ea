"""Keys of verl that are read together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4llm.core.errors import ConfigError
from rl4llm_compat.migration.table import Keys, at_least_zero

A, M, R = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What a file does not contain: the rows of its dataset, None if unknown."""

    rows: int | None = None


@dataclass(frozen=True, slots=True)
class JointRule:
    """Several keys that are read together. Any of `names` triggers it; `keys` returns ours for all values."""

    names: tuple[str, ...]
    keys: Callable[[Values, DataFacts], Keys]


ESTIMATORS = {
    "gae": "ppo", "grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo", "remax": "remax",
    "reinforce_plus_plus": "reinforce_pp", "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}  # fmt: skip
LOSSES = {
    "vanilla": "", "gspo": "gspo", "sapo": "sapo", "geo_mean": "gmpo", "cispo": "cispo", "dppo_tv": "dppo",
    "dppo_kl": "dppo_kl",
}  # fmt: skip
DIVERGENCES = ("dppo", "dppo_kl")  # whose bounds have other defaults here
CLIPPED = (
    *DIVERGENCES,
    "grpo",
    "ppo",
    "dapo",
    "gspo",
    "gmpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
)
AGGREGATIONS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
}
ESTIMATES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def algorithm_of(values: Values) -> str:
    """Return the name of our algorithm. Raises ConfigError for an estimator or a loss without a counterpart."""
    estimator = str(values.get("algorithm.adv_estimator", "gae"))
    mode = str(values.get(f"{A}.policy_loss.loss_mode", "vanilla"))
    for where, name, known in (
        ("algorithm.adv_estimator", estimator, ESTIMATORS),
        (f"{A}.policy_loss.loss_mode", mode, LOSSES),
    ):
        if name not in known:
            raise ConfigError(f"{where}={name} has no counterpart. Accepted: {', '.join(known)}.")
    if LOSSES[mode] and ESTIMATORS[estimator] != "grpo":
        raise ConfigError(
            f"{A}.policy_loss.loss_mode={mode} with algorithm.adv_estimator={estimator} has no counterpart. Accepted: grpo."
        )
    filters = values.get("algorithm.filter_groups.enable")
    return LOSSES[mode] or ("dapo" if filters and estimator == "grpo" else ESTIMATORS[estimator])


def _algorithm(values: Values, facts: DataFacts) -> Keys:
    name = algorithm_of(values)
    return {"algorithm.name": name, **(_clipping(values, facts) if name in DIVERGENCES else {})}


def _ranks(values: Values) -> int:
    count = int(values["trainer.n_gpus_per_node"]) * int(values["trainer.nnodes"])
    if count < 1:
        raise ConfigError(f"trainer.n_gpus_per_node x trainer.nnodes is {count}. Accepted: 1 or more.")
    return count


def _prompts(values: Values) -> int:
    return math.ceil(int(values["data.train_batch_size"]) / _ranks(values))


def _batches(values: Values, facts: DataFacts) -> Keys:
    updates = round(int(values["data.train_batch_size"]) / int(values[f"{A}.ppo_mini_batch_size"]))
    return {"rollout.prompts": _prompts(values), "training.updates_per_rollout": max(1, updates)}


def _steps(values: Values, facts: DataFacts) -> Keys:
    if values.get("trainer.total_training_steps"):
        return {"max_steps": int(values["trainer.total_training_steps"])}
    batch, epochs = _prompts(values) * _ranks(values), int(values["trainer.total_epochs"])
    if facts.rows is None:
        raise ConfigError(
            f"max_steps is rows x {epochs} epochs / {batch} prompts. Set it, or pass --rows N with the rows of the dataset."
        )
    return {"max_steps": max(1, facts.rows // batch * epochs)}


def _warmup(values: Values, facts: DataFacts) -> Keys:
    steps = int(values.get(f"{A}.optim.lr_warmup_steps", -1))
    share = float(values.get(f"{A}.optim.lr_warmup_steps_ratio", 0.0))
    if steps < 0 and share > 0:
        loop = _steps(values, facts)["max_steps"]
        updates = _batches(values, facts)["training.updates_per_rollout"] * int(
            values.get(f"{A}.ppo_epochs", 1)
        )
        steps = math.ceil(share * loop * updates)
    return {"training.warmup_steps": max(0, steps)}


def _clipping(values: Values, facts: DataFacts) -> Keys:
    name = algorithm_of(values)
    if name == "sapo":
        sides = {"positive": values.get(f"{A}.tau_pos", 1.0), "negative": values.get(f"{A}.tau_neg", 1.05)}
        return {f"algorithm.tau_{side}": value for side, value in sides.items()}
    if name not in (*CLIPPED, "cispo"):
        return {}
    both = values.get(f"{A}.clip_ratio", 0.2)
    low, high = (values.get(f"{A}.clip_ratio_{side}") for side in ("low", "high"))
    keys = {
        "algorithm.clip_low": both if low is None else low,
        "algorithm.clip_high": both if high is None else high,
    }
    if name in DIVERGENCES:  # verl has no such term
        keys["algorithm.log_ratio_coef"] = 0.0
    dual = values.get(f"{A}.clip_ratio_c")
    return keys | (
        {"algorithm.dual_clip": dual} if dual is not None and name in ("grpo", "ppo", "dapo") else {}
    )


def _divergence(values: Values, facts: DataFacts) -> Keys:
    if values.get(f"{A}.use_kl_loss"):
        kind = str(values.get(f"{A}.kl_loss_type", "low_var_kl")).rstrip("+")
        where, coefficient = "loss", values.get(f"{A}.kl_loss_coef", 0.001)
    elif values.get("algorithm.use_kl_in_reward"):
        kind = str(values.get("algorithm.kl_penalty", "kl")).rstrip("+")
        where, coefficient = "reward", values.get("algorithm.kl_ctrl.kl_coef", 0.001)
    else:
        return {"algorithm.kl_coef": 0.0}
    if kind not in ESTIMATES:
        raise ConfigError(
            f"verl's estimate {kind} of the KL has no counterpart. Accepted: {', '.join(ESTIMATES)}."
        )
    keys = {
        "algorithm.kl_coef": coefficient,
        "algorithm.kl_estimator": ESTIMATES[kind],
        "algorithm.kl_in": where,
    }
    if where == "reward" and values.get("algorithm.kl_ctrl.type") == "adaptive":
        keys |= {"algorithm.kl_target": values.get("algorithm.kl_ctrl.target_kl", 0.1)}
    return keys


def _aggregation(values: Values, facts: DataFacts) -> Keys:
    mode = str(values[f"{A}.loss_agg_mode"])
    if mode not in AGGREGATIONS:
        raise ConfigError(
            f"{A}.loss_agg_mode={mode} has no counterpart. Accepted: {', '.join(AGGREGATIONS)}."
        )
    keys: Keys = {"algorithm.aggregation": AGGREGATIONS[mode]}
    if AGGREGATIONS[mode] == "constant":
        width = values.get(f"{A}.loss_scale_factor") or values["data.max_response_length"]
        keys["training.constant_length"] = width
    return keys


def _scaling(values: Values, facts: DataFacts) -> Keys:
    scaled = values["algorithm.norm_adv_by_std_in_grpo"]
    if algorithm_of(values) in ("ppo", "rloo", "remax", "reinforce_pp", "reinforce_pp_baseline"):
        return {}
    return {"algorithm.scale_rewards": "group" if scaled else "none"}


def _of_ppo(ours: str, *theirs: str, by: Callable[[Any], Any] = lambda value: value) -> JointRule:
    """Return the rule of an option of PPO: the first of verl's keys that is set."""

    def keys(values: Values, facts: DataFacts) -> Keys:
        found = [values[name] for name in theirs if values.get(name) not in (None, "")]
        known = ("ppo", "reinforce_pp") if ours == "gamma" else ("ppo",)
        return {f"algorithm.{ours}": by(found[0])} if found and algorithm_of(values) in known else {}

    return JointRule(theirs, keys)


def _rewards(values: Values, facts: DataFacts) -> Keys:
    for prefix in ("", "reward."):
        if path := values.get(f"{prefix}custom_reward_function.path"):
            function = values.get(f"{prefix}custom_reward_function.name") or "compute_score"
            keys: Keys = {"name": "compute_score", "path": str(path), "function": function}
            break
    else:
        keys = {"name": "math"}
    rewards: list[Keys] = [keys]
    if values.get("reward_model.enable") or values.get("reward.reward_model.enable"):
        path = values.get("reward_model.model.path") or values.get("reward.reward_model.model.path")
        rewards = [{"name": "reward_model", "path": str(path)}]
    for cfg in ("reward_model.reward_kwargs", "reward.reward_kwargs"):
        if values.get(f"{cfg}.overlong_buffer_cfg.enable"):
            length = values.get(f"{cfg}.max_resp_len", values["data.max_response_length"])
            buffer = values.get(f"{cfg}.overlong_buffer_cfg.len", 4096)
            factor = values.get(f"{cfg}.overlong_buffer_cfg.penalty_factor", 1.0)
            rewards.append({"name": "overlong", "max_length": length, "buffer": buffer, "factor": factor})
    return {"rewards": rewards}


def _directory(values: Values, facts: DataFacts) -> Keys:
    name = values.get("trainer.default_local_dir") or f"runs/{values.get('trainer.experiment_name', 'verl')}"
    return {"output.dir": str(name)}


def _engine(values: Values, facts: DataFacts) -> Keys:
    name = str(values[f"{R}.name"])
    if name == "hf":
        return {}
    if name not in ("vllm", "sglang"):
        raise ConfigError(f"{R}.name={name} has no counterpart. Accepted: vllm, sglang, hf.")
    port = {"vllm": 8000, "sglang": 30000}[name]
    return {"inference.name": name, "inference.url": f"http://127.0.0.1:{port}", "inference.cohost": True}


def _lora(values: Values, facts: DataFacts) -> Keys:
    old = f"{M}.lora_rank", f"{M}.lora_alpha", f"{M}.target_modules"
    new = f"{M}.lora.rank", f"{M}.lora.alpha", f"{M}.lora.target_modules"
    rank, alpha, targets = (values.get(b, values.get(a)) for a, b in zip(old, new, strict=True))
    if not rank:
        return {}
    named = [] if targets in (None, "all-linear") else [targets] if isinstance(targets, str) else targets
    return {"model.lora.rank": rank, "model.lora.alpha": alpha or 16, "model.lora.targets": list(named)}


def _trackers(values: Values, facts: DataFacts) -> Keys:
    chosen = values["trainer.logger"]
    names = [chosen] if isinstance(chosen, str) else list(chosen or ())
    return {f"tracking.{name}": True for name in names if name in ("wandb", "tensorboard")}


def _backend(values: Values, facts: DataFacts) -> Keys:
    if (name := values[f"{A}.strategy"]) not in ("fsdp", "fsdp2"):
        raise ConfigError(f"{A}.strategy={name} has no counterpart. Accepted: fsdp, fsdp2.")
    return {"backend.name": "torch", "backend.shard": "fsdp2"}


def _joint(keys: Callable[[Values, DataFacts], Keys], names: str) -> JointRule:
    short = {"A": A, "M": M, "R": R}
    parts = (name.partition(".") for name in names.split())
    return JointRule(tuple(f"{short.get(first, first)}.{rest}" for first, _, rest in parts), keys)


RULES = (
    _joint(
        _algorithm,
        "algorithm.adv_estimator A.policy_loss.loss_mode algorithm.filter_groups.enable",
    ),
    _joint(_batches, "data.train_batch_size A.ppo_mini_batch_size"),
    _joint(_steps, "trainer.total_epochs trainer.total_training_steps"),
    _joint(_warmup, "A.optim.lr_warmup_steps A.optim.lr_warmup_steps_ratio"),
    _joint(_clipping, "A.clip_ratio A.clip_ratio_low A.clip_ratio_high A.clip_ratio_c A.tau_pos A.tau_neg"),
    _joint(
        _divergence,
        "A.use_kl_loss A.kl_loss_coef A.kl_loss_type algorithm.use_kl_in_reward algorithm.kl_penalty "
        "algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.type algorithm.kl_ctrl.target_kl",
    ),
    _joint(_aggregation, "A.loss_agg_mode A.loss_scale_factor"),
    _joint(_scaling, "algorithm.norm_adv_by_std_in_grpo"),
    _of_ppo("gamma", "algorithm.gamma"),
    _of_ppo("lam", "algorithm.lam"),
    _of_ppo("value_clip", "critic.cliprange_value"),
    _of_ppo("critic_lr", "critic.optim.lr"),
    _of_ppo("critic_path", "critic.model.path", by=lambda path: str(Path(str(path)).expanduser())),
    _of_ppo("critic_passes", "critic.ppo_epochs", f"{A}.ppo_epochs"),
    _of_ppo("critic_warmup_steps", "trainer.critic_warmup", by=at_least_zero),
    _joint(
        _rewards,
        "custom_reward_function.path reward.custom_reward_function.path reward_model.enable reward.reward_model.enable",
    ),
    _joint(_engine, "R.name"),
    _joint(_backend, "A.strategy"),
    _joint(_trackers, "trainer.logger"),
    _joint(_directory, "trainer.default_local_dir trainer.experiment_name"),
    _joint(_lora, "M.lora_rank M.lora_alpha M.target_modules M.lora.rank M.lora.alpha M.lora.target_modules"),
)
