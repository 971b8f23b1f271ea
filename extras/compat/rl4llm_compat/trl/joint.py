"""Names of TRL that are combined: batches, steps, losses, engines.

Each function reads the values of all names, with TRL's defaults for those that a script does not set, and returns
configuration keys.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rl4llm.config import TrackingConfig
from rl4llm.core.errors import ConfigError, unknown
from rl4llm_compat.trl.table import Keys

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """Facts that a script does not contain: the number of rows of its dataset, if known, and of training processes."""

    rows: int | None
    ranks: int


@dataclass(frozen=True, slots=True)
class Joint:
    """Any of `names` triggers it; `keys` reads them all and returns configuration keys."""

    names: tuple[str, ...]
    keys: Callable[[Values, TrainingFacts], Keys]


def batches(values: Values, facts: TrainingFacts) -> Keys:
    """Convert completions per process and optimizer step into prompts per rank and rollout."""
    rows = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    if "num_generations" not in values:
        return {"rollout.prompts": rows}
    group, rollout = values["num_generations"], max(rows, _completions(values, facts))
    if rollout % group or rollout % rows or rows < group:
        raise ConfigError(
            f"A rollout has {rollout} completions per process (generation_batch_size), and must be a multiple of "
            f"num_generations={group} and of the optimizer step. A step has {rows} completions "
            "(per_device_train_batch_size x gradient_accumulation_steps), and must have at least a group."
        )
    return {"rollout.prompts": rollout // group, "training.updates_per_rollout": rollout // rows}


def _completions(values: Values, facts: TrainingFacts) -> int:
    """Return the completions of each process between two generations."""
    steps, total = values["steps_per_generation"], values["generation_batch_size"]
    if steps is not None and total is not None:
        raise ConfigError(
            "generation_batch_size and steps_per_generation have the same meaning. Set only one of them."
        )
    if total is None:
        return values["per_device_train_batch_size"] * (steps or values["gradient_accumulation_steps"])
    if total % (values["per_device_train_batch_size"] * facts.ranks):
        raise ConfigError(
            f"generation_batch_size={total} is not a multiple of per_device_train_batch_size="
            f"{values['per_device_train_batch_size']} x {facts.ranks} processes."
        )
    return total // facts.ranks


def steps(values: Values, facts: TrainingFacts) -> Keys:
    """Convert optimizer steps or epochs into steps of the loop."""
    return {"max_steps": _loop_steps(values, facts)}


def _loop_steps(values: Values, facts: TrainingFacts) -> int:
    if values["max_steps"] > 0:
        return math.ceil(values["max_steps"] / _updates(values, facts))
    if facts.rows is None:
        raise ConfigError(
            "num_train_epochs needs a dataset with a known number of rows. Set max_steps instead."
        )
    prompts = batches(values, facts)["rollout.prompts"] * facts.ranks
    if "num_generations" not in values:
        return math.ceil(values["num_train_epochs"] * math.ceil(facts.rows / prompts))
    if facts.rows < prompts:  # TRL drops prompts that do not fill a rollout
        raise ConfigError(
            f"The dataset has {facts.rows} rows, fewer than the {prompts} prompts of a rollout."
        )
    return math.ceil(values["num_train_epochs"] * (facts.rows // prompts))


def _updates(values: Values, facts: TrainingFacts) -> int:
    """Return the optimizer steps in a step of the loop."""
    return batches(values, facts).get("training.updates_per_rollout", 1) * values.get("num_iterations", 1)


def warmup(values: Values, facts: TrainingFacts) -> Keys:
    share = values["warmup_ratio"] or (values["warmup_steps"] if values["warmup_steps"] < 1 else 0)
    if not share:
        return {"training.warmup_steps": int(values["warmup_steps"])}
    return {"training.warmup_steps": math.ceil(share * _loop_steps(values, facts) * _updates(values, facts))}


def _every(name: str, count: float, values: Values, facts: TrainingFacts) -> int:
    """Convert a number of optimizer steps, or a share of all, into steps of the loop."""
    if count <= 0:
        raise ConfigError(f"{name}={count} is not accepted. Accepted: above 0.")
    count = count if count >= 1 else math.ceil(count * _loop_steps(values, facts) * _updates(values, facts))
    return max(1, round(count / _updates(values, facts)))


def _by_steps(name: str, values: Values) -> bool:
    strategy = str(getattr(values[name], "value", values[name]))
    if strategy not in ("no", "steps"):
        raise ConfigError(
            f"{name}={strategy!r} has no counterpart. Accepted: no, or steps with a number of steps."
        )
    return strategy == "steps"


def saving(values: Values, facts: TrainingFacts) -> Keys:
    by_steps = _by_steps("save_strategy", values)
    keep = {} if values["save_total_limit"] is None else {"checkpoint.keep": values["save_total_limit"]}
    return {
        "checkpoint.every": _every("save_steps", values["save_steps"], values, facts) if by_steps else 0,
        **keep,
    }


def measuring(values: Values, facts: TrainingFacts) -> Keys:
    if not _by_steps("eval_strategy", values):
        return {"eval.every": 0}
    name = "logging_steps" if values["eval_steps"] is None else "eval_steps"
    return {"eval.every": _every(name, values[name], values, facts)}


def betas(values: Values, facts: TrainingFacts) -> Keys:
    return {"training.betas": [values["adam_beta1"], values["adam_beta2"]]}


def precision(values: Values, facts: TrainingFacts) -> Keys:
    mixed = not values["fp16"] if values["bf16"] is None else values["bf16"]
    return {"model.autocast": "bfloat16" if mixed else "none"}


TRACKERS = tuple(item.name for item in fields(TrackingConfig) if item.type == "bool")
ELSEWHERE = (
    "azure_ml",
    "clearml",
    "codecarbon",
    "comet_ml",
    "dagshub",
    "dvclive",
    "flyte",
    "mlflow",
    "neptune",
    "swanlab",
    "trackio",
)
"""Trackers of transformers without a counterpart; metrics.jsonl has what they would get."""


def trackers(values: Values, facts: TrainingFacts) -> Keys:
    chosen = values["report_to"]
    names = [chosen] if isinstance(chosen, str) else list(chosen or ())
    names = [name for name in names if name != "none"]
    for name in names:
        if name in ELSEWHERE:
            warnings.warn(f"report_to={name!r} is ignored. Accepted: {', '.join(TRACKERS)}.", stacklevel=6)
        elif name not in (*TRACKERS, "all"):
            raise ConfigError(unknown("report_to", str(name), (*TRACKERS, "all", "none")))
    return {f"tracking.{name}": name in names or "all" in names for name in TRACKERS}


AGGREGATIONS = {
    "dapo": "token", "bnpo": "token", "grpo": "sequence", "dr_grpo": "constant", "cispo": "token", "sapo": "sequence"
}  # fmt: skip


def loss(values: Values, facts: TrainingFacts) -> Keys:
    """Convert TRL's loss types into methods with an aggregation."""
    kind, level = values["loss_type"], values["importance_sampling_level"]
    if kind not in AGGREGATIONS:
        raise ConfigError(unknown("loss_type", str(kind), AGGREGATIONS))
    if level not in ("token", "sequence"):
        raise ConfigError(unknown("importance_sampling_level", str(level), ("token", "sequence")))
    own = kind in ("cispo", "sapo")
    if own and level == "sequence":
        raise ConfigError(f"importance_sampling_level='sequence' has no counterpart with loss_type={kind!r}.")
    keys = {"algorithm.name": kind if own else "gspo" if level == "sequence" else "grpo"}
    keys["algorithm.aggregation"] = AGGREGATIONS[kind]
    if kind == "dr_grpo":
        keys["training.constant_length"] = values["max_completion_length"]
    if kind == "sapo":
        keys |= {
            f"algorithm.tau_{side}": values[f"sapo_temperature_{side[:3]}"]
            for side in ("positive", "negative")
        }
    return keys


def clipping(values: Values, facts: TrainingFacts) -> Keys:
    kind, level = values.get("loss_type", "dapo"), values.get("importance_sampling_level", "token")
    low, high, delta = values["epsilon"], values["epsilon_high"], values["delta"]
    if kind == "sapo":
        return {}
    if kind == "cispo":
        if high is None or high < 1:
            raise ConfigError(
                f"epsilon_high={high} is not accepted with loss_type='cispo'. Accepted: the bound of a ratio, 1 or more."
            )
        return {"algorithm.clip_low": 1.0, "algorithm.clip_high": high - 1}
    high = low if high is None else high
    keys = {"algorithm.clip_low": low, "algorithm.clip_high": high}
    if delta is None:
        return keys
    if level == "sequence" or not delta > 1 + high:
        raise ConfigError(
            f"delta={delta} is not accepted. Accepted: above 1 + epsilon_high, with importance_sampling_level='token'."
        )
    return keys | {"algorithm.dual_clip": delta}


def divergence(values: Values, facts: TrainingFacts) -> Keys:
    """Use the k3 estimate in the loss; the correction multiplies it by the ratio."""
    coefficient = values["beta"]
    corrected = coefficient > 0 and values["use_bias_correction_kl"]
    if corrected and values.get("importance_sampling_level") == "sequence":
        raise ConfigError(
            "use_bias_correction_kl works per token. Set it to False with importance_sampling_level='sequence'."
        )
    return {
        "algorithm.kl_coef": coefficient,
        "algorithm.kl_estimator": "k3",
        "algorithm.kl_in": "loss",
        "algorithm.kl_weighted": corrected,
    }


def reference(values: Values, facts: TrainingFacts) -> Keys:
    if not values["sync_ref_model"]:
        return {}
    if values["ref_model_mixup_alpha"] != 1:
        raise ConfigError(
            f"ref_model_mixup_alpha={values['ref_model_mixup_alpha']} has no counterpart. Accepted: 1.0, which copies "
            "the policy into the reference."
        )
    return {
        "algorithm.reference_every": _every(
            "ref_model_sync_steps", values["ref_model_sync_steps"], values, facts
        )
    }


def entropy(values: Values, facts: TrainingFacts) -> Keys:
    kind = values.get("loss_type", "dapo")
    if values["entropy_coef"] and AGGREGATIONS.get(kind) != "token":
        raise ConfigError(
            f"entropy_coef has no counterpart with loss_type={kind!r}, which averages over answers; "
            "TRL's bonus is a mean over tokens. Use loss_type='dapo', or algorithm={'entropy_coef': ...}."
        )
    return {"algorithm.entropy_coef": values["entropy_coef"]}


def iterations(values: Values, facts: TrainingFacts) -> Keys:
    return {"training.passes_per_rollout": values["num_iterations"]}


CORRECTIONS = {
    "sequence_mask": "sequence_icepop",
    "token_mask": "icepop",
    "sequence_truncate": "sequence_tis",
    "token_truncate": "tis",
}


def engine(values: Values, facts: TrainingFacts) -> Keys:
    """Use a vLLM server, and the weights that correct for its log-probs."""
    if not values["use_vllm"]:
        return {}
    if values["vllm_mode"] == "colocate":
        warnings.warn(
            "vllm_mode='colocate': the embedded engine samples, in the trainer's process, and no vLLM. For vLLM start "
            "`rl4llm serve vllm --model-path MODEL`, and set vllm_mode='server'.",
            stacklevel=6,
        )
        return {}
    if values["vllm_mode"] != "server":
        raise ConfigError(unknown("vllm_mode", str(values["vllm_mode"]), ("colocate", "server")))
    host = "127.0.0.1" if values["vllm_server_host"] == "0.0.0.0" else values["vllm_server_host"]
    url = values["vllm_server_base_url"] or f"http://{host}:{values['vllm_server_port']}"
    return {"inference.name": "vllm", "inference.url": url, **(_correction(values))}


def _correction(values: Values) -> Keys:
    if not values["vllm_importance_sampling_correction"]:
        return {}
    mode = values["vllm_importance_sampling_mode"]
    low, high = (values[f"vllm_importance_sampling_clip_{side}"] for side in ("min", "max"))
    if mode not in CORRECTIONS:
        raise ConfigError(unknown("vllm_importance_sampling_mode", str(mode), CORRECTIONS))
    if mode.endswith("truncate") and low is not None:
        raise ConfigError("vllm_importance_sampling_clip_min has no counterpart with a truncating mode.")
    return {
        "algorithm.old_logprobs": "recomputed",
        "algorithm.correction": CORRECTIONS[mode],
        "algorithm.correction_low": low or 0.0,
        "algorithm.correction_high": math.inf if high is None else high,
    }


def turns(values: Values, facts: TrainingFacts) -> Keys:
    """Bound the turns of episodes with tools; without tools an episode has one turn."""
    calls, tools = values["max_tool_calling_iterations"], values.get("tools")
    played = tools or values.get("environment_factory") is not None
    return {"env.max_steps": calls + 1} if played and calls is not None else {}


def leave_one_out(values: Values, facts: TrainingFacts) -> Keys:
    """Sum the tokens of an answer, and take the mean over answers, as REINFORCE does."""
    if batches(values, facts)["training.updates_per_rollout"] * values["num_iterations"] > 1:
        warnings.warn(
            "RLOO with several optimizer steps per rollout clips the ratio of each token; TRL clips that of an answer.",
            stacklevel=6,
        )
    return {
        "algorithm.aggregation": "constant",
        "training.constant_length": 1,
        "algorithm.scale_rewards": "batch" if values["normalize_advantages"] else "none",
        "algorithm.kl_in": "reward",
        "algorithm.kl_estimator": "k1",
    }


def preference(values: Values, facts: TrainingFacts) -> Keys:
    kinds = [values["loss_type"]] if isinstance(values["loss_type"], str) else list(values["loss_type"])
    if len(kinds) != 1 or kinds[0] not in ("sigmoid", "ipo"):
        raise ConfigError(
            f"loss_type={values['loss_type']!r} has no counterpart. Accepted: either 'sigmoid' or 'ipo'."
        )
    return {"algorithm.loss": kinds[0], "algorithm.length_normalized": kinds[0] == "ipo"}


_BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
)

EVERYWHERE = (
    Joint(_BATCH, batches),
    Joint(("max_steps", "num_train_epochs"), steps),
    Joint(("warmup_steps", "warmup_ratio"), warmup),
    Joint(("save_strategy", "save_steps", "save_total_limit"), saving),
    Joint(("eval_strategy", "eval_steps"), measuring),
    Joint(("adam_beta1", "adam_beta2"), betas),
    Joint(("bf16",), precision),
    Joint(("report_to",), trackers),
)
OF_EPISODES = (
    *EVERYWHERE,
    Joint(("num_iterations",), iterations),
    Joint(("epsilon", "epsilon_high", "delta"), clipping),
    Joint(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), reference),
    Joint(("entropy_coef",), entropy),
    Joint(("max_tool_calling_iterations",), turns),
    Joint(
        (
            *("use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
            *(f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "clip_min")),
        ),
        engine,
    ),
)
DIVERGENCE = Joint(("beta", "use_bias_correction_kl"), divergence)
LOSS = Joint(("loss_type", "importance_sampling_level", "sapo_temperature_pos", "sapo_temperature_neg"), loss)

JOINTS: dict[str, tuple[Joint, ...]] = {
    "grpo": (*OF_EPISODES, DIVERGENCE, LOSS),
    "rloo": (
        *OF_EPISODES,
        Joint((*_BATCH, "num_generations", "num_iterations", "normalize_advantages"), leave_one_out),
    ),
    "dpo": (*EVERYWHERE, Joint(("loss_type",), preference)),
    "kto": EVERYWHERE,
    "reward_model": EVERYWHERE,
    "sft": EVERYWHERE,
}
"""The joints of each trainer, by its algorithm."""
