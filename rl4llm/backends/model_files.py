"""What a model directory holds: its kind, and what cannot train though transformers would load it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from rl4llm.core.errors import ModelError
from rl4llm.core.registry import load

if TYPE_CHECKING:
    from rl4llm.backends.vision_language import WholeCheckpoint

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ATTRIBUTE = "_rl4llm_whole_checkpoint"
ANOTHER_HEAD = re.compile(r"For(?!CausalLM|ConditionalGeneration|SequenceClassification)[A-Z]\w*$")
QUANTIZED = ("quantization_config", "compression_config")
READ = ("fp8", "mxfp4", "bitsandbytes")


def model_directory(path: str | Path) -> str | Path:
    """Return where the model is: `model/` for the directory of a run, otherwise the path itself."""
    if not (Path(path) / "run.json").is_file():
        return path
    if not (Path(path) / "model").is_dir():  # its path would be read as a name on the hub
        raise ModelError(f"model.path={str(path)!r} is a run that has not finished. Resume it first.")
    return Path(path) / "model"


def check_kind(path: str, config: PretrainedConfig, text_config: PretrainedConfig) -> None:
    """Raise ModelError for anything but a causal language model, or a model around one, or if its weights cannot be read.

    Weights in FP8 and MXFP4 are dequantized while transformers loads them; those of bitsandbytes stay in 4 bits.
    """
    settings = [getattr(part, name, None) for part in (config, text_config) for name in QUANTIZED]
    for setting in filter(None, settings):
        method = setting.get("quant_method")
        if text_config is not config or method not in READ or setting.get("load_in_8bit"):
            raise ModelError(
                f"model.path={path!r} is quantized: {setting!s:.200}. Use the checkpoint that was quantized, such as the "
                "name without -FP8, -AWQ or -GPTQ."
            )
        setting["dequantize"] = True
    saved = (text_config.architectures or config.architectures or [type(text_config).__name__])[0]
    if type(text_config) not in AutoModelForCausalLM._model_mapping or ANOTHER_HEAD.search(saved):
        raise ModelError(
            f"model.path={path!r} is a {saved}, not a causal language model. Accepted: checkpoints of a ...ForCausalLM."
        )


def refuse_adapted(model: Any, path: str = "") -> None:
    """Raise ModelError for a PeftModel, a model with an adapter, and a `path` with one, which needs PEFT to be read."""
    if getattr(model, "peft_config", None) or (path and Path(path, "adapter_config.json").is_file()):
        raise ModelError(
            "The model has a PEFT adapter, which is not read. Merge it with `model.merge_and_unload()`, or pass the base "
            "model and model.lora.rank to train a new one."
        )


def is_around_text(config: PretrainedConfig) -> bool:
    """Return whether a config is of several models, one of them a causal language model."""
    text = config.get_text_config()
    return text is not config and (
        type(text) in AutoModelForCausalLM._model_mapping
        or load("rl4llm.backends.vision_language:register_text_part")(type(text))
    )


def is_classifier(config: PretrainedConfig) -> bool:
    """Return whether a config describes a model with a score in the place of an output layer."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def is_scored(path: str, config: PretrainedConfig, values: bool) -> bool:
    """Return whether a directory holds a classifier; raise ModelError for one where no `values` are wanted."""
    scored = is_classifier(config)
    if scored and not values:
        raise ModelError(
            f"model.path={path!r} is a reward model, which cannot generate. Use it as the reward `reward_model`, as a "
            "critic, or with algorithm.name=reward_model."
        )
    return scored


def whole_checkpoint(model: PreTrainedModel) -> WholeCheckpoint | None:
    """Return the checkpoint that a text model is a part of, if it is one."""
    return getattr(model, ATTRIBUTE, None)


@contextmanager
def without_reports() -> Iterator[None]:
    """Switch off the warnings of transformers, which would list each tensor that is left in the files."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
