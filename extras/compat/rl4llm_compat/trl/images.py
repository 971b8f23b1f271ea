"""Images in scripts of TRL: columns and parts of rows, models of images and text, and processors.

TRL trains all weights of such a model, unless the script froze some of them or trains an adapter.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from transformers import AutoImageProcessor, PreTrainedModel, ProcessorMixin

from rl4llm.core.errors import ConfigError
from rl4llm_compat.trl.table import Keys

COLUMNS = ("image", "images")
SIZES = (
    "size",
    "min_pixels",
    "max_pixels",
    "patch_size",
    "merge_size",
    "image_mean",
    "image_std",
    "do_resize",
)
"""Options of an image processor that change what the model sees."""


def has_images(row: Mapping[str, Any]) -> bool:
    """Return whether a row has images, in its columns or in parts of its messages."""
    messages = (row[name] for name in ("prompt", "messages") if isinstance(row.get(name), list | tuple))
    return bool(_of_columns(row)) or any(_shows(item) for found in messages for item in found)


def placed(row: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    """Return the messages of a row with a part for each image of its columns.

    TRL shows them before the text of the first message of the user, unless parts of messages have their places.
    """
    asked = next((place for place, one in enumerate(messages) if one.get("role") == "user"), None)
    images, text = len(_of_columns(row)), None if asked is None else messages[asked].get("content")
    if not images or asked is None or not isinstance(text, str) or any(map(_shows, messages)):
        return messages
    parts = [*[{"type": "image"}] * images, {"type": "text", "text": text}]
    return [*messages[:asked], {**messages[asked], "content": parts}, *messages[asked + 1 :]]


def sees_images(model: Any) -> bool:
    """Return whether an object is a model of images and text."""
    return isinstance(model, PreTrainedModel) and getattr(model.config, "vision_config", None) is not None


def keys_of(model: Any, *, adapter: bool) -> Keys:
    """Return the configuration keys for rows with images.

    Raises ConfigError if the script froze other parts of the model than the image side.
    """
    if not sees_images(model):
        return {"model.vision": "frozen" if adapter else "train"}
    dtype = {"model.dtype": str(model.dtype).removeprefix("torch.")}
    if adapter:
        return {"model.vision": "frozen", **dtype}
    side: set[bool] = set()
    text: set[bool] = set()
    for name, parameter in model.named_parameters():
        of_text = "language_model." in name or name.startswith("lm_head.")
        (text if of_text else side).add(parameter.requires_grad)
    if text != {True} or len(side) != 1:
        raise ConfigError(
            "The script froze a part of the model that cannot be frozen alone. Accepted: all weights train, or all except "
            "those of the image side, or an adapter (peft_config)."
        )
    return {"model.vision": "train" if side == {True} else "frozen", **dtype}


def tokenizer_of(processor: Any) -> Any:
    """Return the tokenizer of a processor of images and text, with the processor's chat template; others unchanged."""
    if not isinstance(processor, ProcessorMixin):
        return processor
    tokenizer, template = processor.tokenizer, processor.chat_template
    if template and template != tokenizer.chat_template:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    return tokenizer


def check_processor(processor: Any, path: str) -> None:
    """Raise ConfigError for a processor with other sizes of images than the one at `path`, which the run uses."""
    if not isinstance(processor, ProcessorMixin):
        return
    own = processor.image_processor.to_dict()
    stored = AutoImageProcessor.from_pretrained(path, backend="pil").to_dict()
    for name in SIZES:
        if name in own and json.dumps(own[name], default=dict) != json.dumps(stored.get(name), default=dict):
            raise ConfigError(
                f"processing_class has {name}={own[name]!r}, but that of {path!r} has {stored.get(name)!r}, which the run "
                "uses. Next: save the model and this processor in one directory, and pass that as the model."
            )


def _of_columns(row: Mapping[str, Any]) -> list[Any]:
    given = [row[name] for name in COLUMNS if row.get(name) is not None]
    each = (item for value in given for item in (value if isinstance(value, list | tuple) else [value]))
    return [item for item in each if item is not None]


def _shows(message: Any) -> bool:
    """Return whether a message has a part that is an image."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(parts, list | tuple) and any(
        isinstance(part, Mapping) and "image" in str(part.get("type")) for part in parts
    )
