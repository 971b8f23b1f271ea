"""Tiny random models of families whose images do not come as those of Qwen2-VL to Qwen3-VL do, as their directories."""

import copy
import json

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_vision import IMAGE, VISION_END, VISION_START, build_vision_model, save_vision_model

from rl4llm.backends.source_form import save_pretrained

HIDDEN, SIDE = 96, 56  # of the text model; and pixels of an image, 4 tokens, in families with one size
PIXELS = {
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_resize": True, "do_rescale": True,
    "do_normalize": True, "do_convert_rgb": True, "resample": 3,
}  # fmt: skip
VIT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": 14, "initializer_range": 0.05,
}  # fmt: skip


def text_of(tokenizer, **others):
    return {
        "vocab_size": len(tokenizer), "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HIDDEN // 4, "max_position_embeddings": 512,
        "initializer_range": 0.05, "tie_word_embeddings": True, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **others,
    }  # fmt: skip


def marks_of(tokenizer):
    return tokenizer.convert_tokens_to_ids([VISION_START, IMAGE, VISION_END])


def qwen3_5(tokenizer):
    start, image, end = marks_of(tokenizer)
    rope = {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [4, 4, 4], "mrope_interleaved": True}
    text = text_of(
        tokenizer, layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        rope_parameters=rope | {"partial_rotary_factor": 1.0},
    )  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 16,
        "out_hidden_size": HIDDEN, "num_position_embeddings": 64, "initializer_range": 0.05,
    }  # fmt: skip
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=vision, image_token_id=image, video_token_id=len(tokenizer) + 1,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3_5ForConditionalGeneration(config)


def internvl(tokenizer):
    text = text_of(tokenizer, model_type="qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e3})
    config = transformers.InternVLConfig(
        text_config=text, vision_config=VIT, image_token_id=marks_of(tokenizer)[1], image_seq_length=4
    )
    return transformers.InternVLForConditionalGeneration(config)


def gemma3(tokenizer):
    start, image, end = marks_of(tokenizer)
    text = text_of(
        tokenizer, query_pre_attn_scalar=24, sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=VIT | {"vision_use_head": False}, mm_tokens_per_image=4, boi_token_index=start,
        eoi_token_index=end, image_token_index=image,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


BUILT = {"qwen3_5": qwen3_5, "internvl": internvl, "gemma3": gemma3}
GRIDS = {"qwen2_5_vl": 28, "qwen3_vl": 32, "qwen3_5": 32}
"""The side of a token in pixels, of families whose images keep their proportions."""

SQUARES = {
    "internvl": {
        "preprocessor": {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": False},
        "named": {"start_image_token": VISION_START, "end_image_token": VISION_END, "context_image_token": IMAGE},
        "template": IMAGE,
    },
    "gemma3": {
        "preprocessor": {"image_processor_type": "Gemma3ImageProcessor"},
        "named": {"boi_token": VISION_START, "eoi_token": VISION_END, "image_token": IMAGE},
        "template": VISION_START,
    },
}  # fmt: skip
"""Families with one size: their image processor, what their tokenizer names tokens, and what their template writes."""

BOTH_WAYS = ("gemma3",)
"""Families in which the tokens of an image attend to each other in both directions."""

FAMILIES = (*GRIDS, *SQUARES)


def write(family, tokenizer, directory):
    """Write a tiny model of a family with random weights, none of them zero."""
    directory.mkdir()
    if family not in BUILT:
        save_vision_model(build_vision_model(tokenizer, 5, family), tokenizer, directory)
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = BUILT[family](tokenizer).eval()
        for parameter in model.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)
    if family in GRIDS:
        save_vision_model(model, tokenizer, directory)
        return
    own, tokenizer = SQUARES[family], copy.deepcopy(tokenizer)
    frame = VISION_START + IMAGE + VISION_END
    assert frame in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(frame, own["template"])
    save_pretrained(model, directory)
    if family == "gemma3":  # whose files have another name for this part
        file, old = directory / "model.safetensors", "vision_tower."
        tensors = load_file(file)
        renamed = {name.replace(old, f"{old}vision_model."): tensor for name, tensor in tensors.items()}
        save_file(renamed, file, metadata={"format": "pt"})
    tokenizer.save_pretrained(directory)
    change(directory / "tokenizer_config.json", own["named"])
    processor = PIXELS | {"size": {"height": SIDE, "width": SIDE}} | own["preprocessor"]
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))


def change(file, keys):
    """Change keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
