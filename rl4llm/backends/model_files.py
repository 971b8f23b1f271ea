"""What a model directory must be before anything of it is loaded: its kind, and whole safetensors of a plain model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from rl4llm.core.errors import ModelError
from rl4llm.core.registry import load

if TYPE_CHECKING:
    from rl4llm.backends.vision_language import WholeCheckpoint

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ATTRIBUTE = "_rl4llm_whole_checkpoint"
ADAPTER = "adapter_config.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
ANOTHER_HEAD = re.compile(r"For(?!CausalLM|ConditionalGeneration|SequenceClassification)[A-Z]\w*$")
AGAIN = "Copy the directory again from its source."


def model_directory(path: str | Path) -> str | Path:
    """Return where the model is: `model/` for the directory of a finished run, otherwise the path itself."""
    if not (Path(path) / "run.json").is_file():
        return path
    if not (Path(path) / "model").is_dir():
        raise ModelError(
            f"model.path={str(path)!r} is a run that has not finished: it has no model/ yet. Finish the run first."
        )
    return Path(path) / "model"


def check_model_path(path: str | Path) -> str:
    """Return where the model is; raise ModelError for a path without one that can train. This does not contact the hub."""
    path = str(model_directory(path))
    check_directory(path)
    directory = Path(path)
    config = directory / "config.json"
    if not directory.is_dir():
        return path
    if (directory / ADAPTER).is_file():
        raise ModelError(adapter_message(path, beside=config.is_file()))
    if not config.is_file():
        raise ModelError(
            f"model.path={str(directory)!r} has no config.json, so it is no Hugging Face model directory. Accepted: what "
            "`save_pretrained` wrote."
        )
    refuse_quantized(path, read_json(config))
    return path


def check_weights(path: str | Path) -> None:
    """Raise ModelError unless the weights of a model directory are complete safetensors; a hub name is not checked."""
    directory = Path(check_model_path(path))
    if not directory.is_dir():
        return
    files: set[Any] = {WEIGHTS} if (directory / WEIGHTS).is_file() else set()
    if (directory / INDEX).is_file():
        places = read_json(directory / INDEX).get("weight_map")
        shards = set(places.values()) if isinstance(places, dict) else {None}
        if files - shards:
            raise ModelError(
                f"model.path={str(directory)!r} has {WEIGHTS} and an index of other files ({INDEX}). Remove one of them."
            )
        files |= shards
    if not files:
        pickled = sorted(file.name for kind in PICKLED for file in directory.glob(kind))
        note = f", only {pickled[0]}, a pickle, which can run code and is not read" if pickled else ""
        raise ModelError(
            f"model.path={str(directory)!r} has no {WEIGHTS}{note}. Save the model with `save_pretrained`, which writes "
            "safetensors."
        )
    for name in sorted(files, key=str):
        if not isinstance(name, str) or Path(name).name != name or not (directory / name).is_file():
            raise ModelError(
                f"{directory / INDEX} names {name!r}, which is not a file in the directory. {AGAIN}"
            )
        try:
            with safe_open(directory / name, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{directory / name} is damaged or incomplete: {error}. {AGAIN}") from error


def check_kind(path: str, config: PretrainedConfig) -> None:
    """Raise ModelError for a config of anything but an unquantized causal language model."""
    refuse_quantized(path, config.to_dict())
    saved = (config.architectures or [type(config).__name__])[0]
    if type(config) not in AutoModelForCausalLM._model_mapping or ANOTHER_HEAD.search(saved):
        raise ModelError(
            f"model.path={path!r} is a {saved}, not a causal language model. Accepted: checkpoints of a ...ForCausalLM."
        )


def refuse_quantized(path: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a config whose weights are quantized, in the whole model or in its text part."""
    configs = [config, config.get("text_config")]
    methods = [
        part[name]
        for part in configs
        if isinstance(part, Mapping)
        for name in ("quantization_config", "compression_config")
        if part.get(name)
    ]
    if methods:
        method = methods[0].get("quant_method", "unknown") if isinstance(methods[0], Mapping) else methods[0]
        raise ModelError(
            f"model.path={path!r} is quantized (quantization_config, method {method}), which cannot train. Accepted: "
            "float32, bfloat16 or float16 weights. Use the checkpoint that was quantized, such as the name without -FP8, "
            "-AWQ, -GPTQ or -bnb-4bit."
        )


def refuse_adapted(model: Any) -> None:
    """Raise ModelError for a PeftModel, or a model that PEFT put an adapter into."""
    adapters = getattr(model, "peft_config", None)
    if adapters:
        rank = getattr(next(iter(adapters.values())), "r", 16)
        raise ModelError(
            f"The model has a PEFT adapter ({type(model).__name__}), which is not read. Pass the base model and "
            f"model.lora.rank={rank} to train a new adapter, or `model.merge_and_unload()` to keep what it has learned."
        )


def adapter_message(path: str, *, beside: bool) -> str:
    """Return the error for a PEFT adapter, alone or `beside` the weights of its base."""
    without = f", or remove {ADAPTER} to train the weights beside it" if beside else ""
    merge = f"AutoPeftModelForCausalLM.from_pretrained({path!r}).merge_and_unload().save_pretrained('merged')"
    return (
        f"model.path={path!r} holds a PEFT adapter ({ADAPTER}), which is not read. Merge it into its base with PEFT, "
        f"`{merge}`, and use that directory with the tokenizer's files{without}."
    )


def check_directory(path: str) -> None:
    """Raise ModelError for something that looks like a path but is not a directory; anything else may be a hub name."""
    here = Path(path)
    if here.is_dir() or (not here.exists() and path.count("/") <= 1 and not path.startswith((".", "/", "~"))):
        return
    what = "is a file" if here.exists() else "does not exist"
    raise ModelError(
        f"model.path={path!r} {what}. Accepted: a Hugging Face model directory (config.json, *.safetensors, tokenizer "
        "files) or a name on the hub such as 'Qwen/Qwen2.5-0.5B-Instruct'."
    )


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model directory; raise ModelError for anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}. {AGAIN}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}, not an object. {AGAIN}")
    return value


def is_around_text(config: PretrainedConfig) -> bool:
    """Return whether a config is of several models, one of them a causal language model.

    Raise ModelError for a config that is of no causal language model.
    """
    text, mapping = config.get_text_config(), AutoModelForCausalLM._model_mapping
    if text is config:
        return False
    if type(text) in mapping or load("rl4llm.backends.vision_language:register_text_part")(type(text)):
        return True
    if type(config) in mapping:
        return False
    classes = ", ".join(config.architectures or ()) or type(config).__name__
    raise ModelError(
        f"{classes} cannot train: transformers has no causal language model for its text part ({text.model_type}). "
        "Use a checkpoint of a text model, or of a model whose text part has such a class, as Qwen3.5 and Gemma have."
    )


def is_classifier(config: PretrainedConfig) -> bool:
    """Return whether a config describes a model with a score in the place of an output layer."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def is_scored(path: str, config: PretrainedConfig, values: bool) -> bool:
    """Return whether a directory holds a classifier; raise ModelError for one where no `values` are wanted."""
    scored = is_classifier(config)
    if scored and not values:
        raise ModelError(
            f"model.path={path!r} is a reward model ({', '.join(config.architectures or ())}), which cannot generate. Use "
            "it as the reward `reward_model`, as a critic, or with algorithm.name=reward_model."
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
