"""Make a small vision-language model and its tokenizer, and save them as an ordinary Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from rl4llm.backends.source_form import save_pretrained
from rl4llm.backends.tiny import CHAT_TEMPLATE, build_tokenizer

Family = Literal["qwen2_5_vl", "qwen3_vl"]
PATCHES: dict[Family, int] = {"qwen2_5_vl": 14, "qwen3_vl": 16}
MERGED = 2  # patches on each side of what becomes one token
VISION_START, IMAGE, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
PARTS = """\
{%- macro shown(content) -%}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""


def build_vision_tokenizer(texts: Iterable[str], vocab_size: int = 640) -> PreTrainedTokenizerFast:
    """Train a tokenizer as `build_tokenizer` does, with the tokens around an image and a template that shows images."""
    tokenizer = build_tokenizer(texts, vocab_size - 3)
    marks = [AddedToken(mark, special=True, normalized=False) for mark in (VISION_START, IMAGE, VISION_END)]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    template = CHAT_TEMPLATE.replace("messages[0].content }}", "shown(messages[0].content) }}")
    tokenizer.chat_template = PARTS + template.replace("+ message.content }}", "+ shown(message.content) }}")
    return tokenizer


def build_vision_model(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    family: Family = "qwen3_vl",
    *,
    hidden_size: int = 96,
    num_layers: int = 3,
) -> PreTrainedModel:
    """Return a vision-language model with random weights, about half a million of them at the default size."""
    start, image, end = (tokenizer.convert_tokens_to_ids(mark) for mark in (VISION_START, IMAGE, VISION_END))
    head = hidden_size // 4
    sections = [head // 2 - 2 * (head // 6), head // 6, head // 6]
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head,
        "max_position_embeddings": 512, "initializer_range": 0.05, "tie_word_embeddings": True, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": sections},
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": PATCHES[family],
        "out_hidden_size": hidden_size, "spatial_merge_size": MERGED, "temporal_patch_size": 2, "initializer_range": 0.05,
    }  # fmt: skip
    whole: dict[str, Any] = {
        "image_token_id": image, "video_token_id": len(tokenizer) + 1, "vision_start_token_id": start,
        "vision_end_token_id": end, "tie_word_embeddings": True, "text_config": text, "vision_config": vision,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == "qwen2_5_vl":
            vision |= {"fullatt_block_indexes": [1], "window_size": 4 * PATCHES[family]}
            return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**whole)).eval()
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**whole)).eval()


def save_vision_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write both as one Hugging Face directory, with the files of the image processor."""
    save_pretrained(model, directory)
    tokenizer.save_pretrained(directory)
    side = model.config.vision_config.patch_size * MERGED
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": side // MERGED, "merge_size": MERGED,
        "temporal_patch_size": 2, "size": {"shortest_edge": side * side, "longest_edge": 64 * side * side},
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_resize": True, "do_rescale": True,
        "do_normalize": True, "do_convert_rgb": True,
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(processor, indent=2), encoding="utf-8")
