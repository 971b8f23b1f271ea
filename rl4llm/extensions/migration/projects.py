"""All projects whose keys are known here."""

from __future__ import annotations

from typing import Any

from rl4llm.core.registry import PARTS, from_extension, provided
from rl4llm.extensions.migration.original import ORIGINAL
from rl4llm.extensions.migration.row import JointRule, Project, Row, joint, key, none
from rl4llm.extensions.migration.verl import VERL

PROJECTS = (VERL, ORIGINAL)
OF_COMMAND: dict[str, Row] = {
    "model_name_or_path": key("model.path"),
    "model": key("model.path"),
    "dataset_name": key("data.path", note="a hub name or a path"),
    "dataset_train_split": key("data.split"),
    "dataset_test_split": key("eval.split"),
    "dtype": key("model.dtype", lambda kind: "float32" if kind in (None, "auto") else str(kind)),
    "lora_r": key("model.lora.rank"),
    "lora_alpha": key("model.lora.alpha"),
    "lora_target_modules": key("model.lora.targets", lambda names: [names] if isinstance(names, str) else list(names)),
    "use_peft": none("`model.lora.rank` above 0 trains an adapter"),
    "reward_funcs": none("`rewards` names them; for functions use the trainers of `rl4llm.extensions.trl`"),
    "load_in_4bit": none("rl4llm does not train quantized weights"),
    "load_in_8bit": none("rl4llm does not train quantized weights"),
    "attn_implementation": none("rl4llm chooses the attention"),
}  # fmt: skip
"""What scripts of TRL take beside their config."""


def of_trl(*algorithms: str) -> list[Project]:
    """Return TRL's names for the trainers of algorithms; [] if no extension provides them."""
    return [trl(algorithm) for algorithm in algorithms] if "trl_tables" in provided(PARTS) else []


def trl(algorithm: str) -> Project:
    """Return TRL's names for the trainer of an algorithm; raise ConfigError if no extension provides them."""
    tables = from_extension("trl_tables", "TRL's names")
    table = tables.get(algorithm, tables["grpo"])
    joints = from_extension("trl_joints", "TRL's names").get(algorithm, ())
    facts = from_extension("trl_facts", "TRL's names")
    rows = {name: _of_alias(alias) for name, alias in table.items()}

    def rule(item: Any) -> JointRule:
        names = tuple(name for name in item.names if name in rows)
        return JointRule(
            names, lambda values, known: dict(item.keys(values, facts(rows=known.rows, ranks=1)))
        )

    base = {} if algorithm == "grpo" else {"algorithm.name": algorithm}
    return Project(
        "TRL",
        OF_COMMAND | rows,
        tuple(map(rule, joints)),
        {name: alias.default for name, alias in table.items()},
        base,
    )


def _of_alias(alias: Any) -> Row:
    if alias.kind == "key":
        return Row(alias.says, "", alias.keys)
    return joint(alias.says) if alias.kind == "joint" else none(alias.says)
