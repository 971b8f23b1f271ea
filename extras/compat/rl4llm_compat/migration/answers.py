"""What rl4llm calls the keys of other projects."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from rl4llm_compat.migration.table import row_of
from rl4llm_compat.trl.table import TABLES

OF_SCRIPTS = {
    "model": "model.path",
    "model_name_or_path": "model.path",
    "dataset_name": "data.path",
    "dataset_train_split": "data.split",
    "dataset_test_split": "eval.split",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.targets",
}
"""What scripts of TRL take beside their config."""

OF_TRAINERS = {
    "train_dataset": "dataset",
    "reward_funcs": "reward_functions",
    "processing_class": "tokenizer",
    "peft_config": "model={'lora': {'rank': 16}}",
    "args": "keywords of the trainer, such as training={'lr': 1e-5}",
}
"""What trainers of TRL take in Python."""

OF_TRL = TABLES["sft"] | TABLES["dpo"] | TABLES["grpo"]
IMPORTS = " `rl4llm import FILE` converts a whole configuration."


def of_key(given: str) -> str:
    """Return a sentence about a key of another project; "" for a key that none of them has.

    >>> of_key("data.train_batch_size")
    "'data.train_batch_size' is a key of verl: here it is `rollout.prompts` (global there, ...). ..."
    """
    name = given.lstrip("+~")
    near = next(_found(name), None) is None and get_close_matches(name, OF_TRL, n=1, cutoff=0.85)
    name = near[0] if near else name
    project, says = next(_found(name), ("", ""))
    if not says or says.startswith(f"here it is `{name}`"):
        return ""
    what = f"{given!r} is unknown. Did you mean {name!r}? It" if near else f"{given!r}"
    return f"{what} is a key of {project}: {says}.{IMPORTS if project == 'verl' else ''}"


def _found(name: str) -> Iterator[tuple[str, str]]:
    """Yield projects that have a key, and what it is here.

    A name of TRL may have a section of ours in front, if our key for it is in that section.
    """
    section, _, last = name.rpartition(".")
    if argument := OF_TRAINERS.get(name.partition(".")[0]):
        yield "TRL", f"here it is `{argument}`"
    if name in OF_SCRIPTS:
        yield "TRL", f"here it is `{OF_SCRIPTS[name]}`"
    alias = OF_TRL.get(last)
    if alias is not None and (not section or f"`{section}." in alias.says):
        here = alias.kind in ("key", "joint")
        yield "TRL", f"{'here it is' if here else 'it has no counterpart:'} {alias.says}"
    if row := row_of(name):
        yield "verl", f"here it is {row}" if row.ours else f"it has {row}"
