"""The configuration keys of mithrl, and the keywords and flags of MRL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.migration.row import Facts, Keys, Project, Row, Rule, each, joint, key, none

Values = Mapping[str, Any]
LOSSES = {
    "grpo": ("grpo", "sequence"), "dapo": ("grpo", "token"), "bnpo": ("grpo", "token"),
    "dr_grpo": ("dr_grpo", "constant"), "cispo": ("cispo", "token"), "sapo": ("sapo", "sequence"),
}  # fmt: skip


def _groups(values: Values, facts: Facts) -> Keys:
    groups = int(values.get("algo.kwargs.n_groups", 1))
    return {
        "rollout.prompts": groups,
        "rollout.group_size": max(1, int(values.get("rollout.n_rollouts", groups)) // groups),
    }


def _factory(values: Values, facts: Facts) -> Keys:
    options = {
        f"env.options.{name.removeprefix('env.kwargs.')}": value
        for name, value in values.items()
        if name.startswith("env.kwargs.")
    }
    return {"env.name": "stepped", "env.task": values["env.factory"]} | options


def _both(bound: Any) -> Keys:
    return {"algorithm.clip_low": bound, "algorithm.clip_high": bound}


def _loss(name: Any) -> Keys:
    algorithm, aggregation = LOSSES.get(str(name), LOSSES["dapo"])
    return {"algorithm.name": algorithm, "algorithm.aggregation": aggregation}


VLLM = {"inference.name": "vllm", "inference.url": "http://127.0.0.1:8000"}
OF_MITHRL: dict[str, Row] = {
    "train.model_name": key("model.path"),
    "train.adapter_path": none("the adapter is in the checkpoints of `output.dir`"),
    "train.use_wandb": key("tracking.wandb"),
    "train.wandb_project_name": key("tracking.project"),
    "train.wandb_run_name": key("output.dir", lambda name: f"runs/{name}", "the directory names the run"),
    "train.train_microbatch_size": none("`training.max_tokens_per_batch` cuts micro-batches by tokens"),
    "train.n_steps": key("max_steps"),
    "train.n_iters": key("training.epochs"),
    "train.lr": key("training.lr", float),
    "train.use_flash_attn": none("rl4llm chooses the attention, from the kernels that torch brings"),
    "train.*": none("see the section `training`"),
    "env.factory": joint("`env.name=stepped`, `env.task`", "the class works unchanged"),
    "env.kwargs": none("`env.options`"),
    "env.kwargs.*": joint("`env.options`"),
    **each(joint("`rollout.prompts`, `rollout.group_size`", "the groups, and the rollouts of each"),
           "rollout.n_rollouts", "algo.kwargs.n_groups", "algo.n_groups"),
    "rollout.max_parallel_rollouts": none("all episodes of a step are played at once; the server limits requests"),
    "rollout.rollout_timeout": Row("`inference.deadline_s`", "", lambda value: {"inference.deadline_s": value}),
    "algo.factory": Row("`algorithm.name`", "GRPO is grpo", lambda _: {"algorithm.name": "grpo"}),
    **each(Row("`algorithm.clip_low`, `clip_high`", "", _both), "algo.kwargs.clip_eps", "algo.clip_eps"),
    **each(key("algorithm.kl_coef"), "algo.kwargs.kl_coef", "algo.kl_coef"),
    **each(none("deviations have 1e-6 added"), "algo.kwargs.group_adv_eps", "algo.group_adv_eps"),
}  # fmt: skip

MITHRL = Project(
    "mithrl",
    OF_MITHRL,
    (
        Rule(("rollout.n_rollouts", "algo.kwargs.n_groups"), _groups),
        Rule(("env.factory", "env.kwargs.*"), _factory),
    ),
    base={"model.lora.rank": 16, **VLLM, "inference.cohost": True},
)


def _gpus(values: Values, facts: Facts) -> Keys:
    keys: Keys = {"launch.gpu": values.get("actor_gpu", "A100")}
    if "rollout_gpu" in values:
        keys["launch.server_gpu"] = values["rollout_gpu"]
    return keys | {"launch.servers": int(values.get("num_rollout_workers", 2)), "inference.name": "vllm"}


def _steps(values: Values, facts: Facts) -> Keys:
    if int(values.get("max_steps", -1)) > 0:
        return {"max_steps": int(values["max_steps"])}
    batch, epochs = int(values.get("batch_size", 8)), int(values.get("num_epochs", 5))
    if facts.rows is None:
        raise ConfigError(
            f"max_steps is rows x {epochs} epochs / {batch} prompts. Set it, or pass --rows N with the rows of the dataset."
        )
    return {"max_steps": math.ceil(facts.rows / batch) * epochs}


OF_MRL: dict[str, Row] = {
    "model": key("model.path"),
    "reward_funcs": none("`rewards: [code]` for sandbox; functions need the Python API, `GRPOTrainer(reward_funcs=...)`"),
    "train_dataset": key("data.path", note="rows need a column `prompt`"),
    **each(joint("`launch.gpu`, `launch.server_gpu`, `launch.servers`", "for `rl4llm launch CONFIG --on modal`"),
           "actor_gpu", "rollout_gpu", "num_rollout_workers"),
    "num_generations": key("rollout.group_size"),
    "batch_size": key("rollout.prompts"),
    "max_samples": key("data.limit"),
    "learning_rate": key("training.lr"),
    **each(joint("`max_steps`", "rows x epochs / `rollout.prompts`"), "max_steps", "num_epochs"),
    "loss_type": Row("`algorithm.name`, `algorithm.aggregation`", "as in TRL", _loss),
    "weight_sync_method": none("`sync.name`: filesystem, tensor or distributed"),
    "use_lora": Row("`model.lora.rank`", "", lambda on: {"model.lora.rank": 16} if on else {}),
    "beta": key("algorithm.kl_coef"),
    "epsilon": Row("`algorithm.clip_low`, `clip_high`", "", _both),
    "scale_rewards": key("algorithm.scale_rewards"),
    **each(key("rollout.max_tokens"), "max_tokens", "max_completion_length"),
    "max_model_len": none("an option of the server: `rl4llm serve --engine vllm MODEL --max-model-len N`"),
    "simple_mode": none("there is one loop"),
}  # fmt: skip

MRL = Project(
    "MRL",
    OF_MRL,
    (Rule(("actor_gpu", "rollout_gpu", "num_rollout_workers"), _gpus), Rule(("max_steps", "num_epochs"), _steps)),
    defaults={"model": "Qwen/Qwen2.5-0.5B-Instruct", "num_generations": 4, "batch_size": 8, "learning_rate": 5e-6,
              "loss_type": "dapo", "max_completion_length": 1024},
    base={"rewards": ["code"]},
)  # fmt: skip
