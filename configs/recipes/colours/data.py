"""Make a tiny vision-language model and images of noisy colours: python data.py DIRECTORY."""

import base64
import io
import json
import random
import sys
from pathlib import Path

import PIL.Image
import torch
from tokenizers import AddedToken
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rl4llm.backends.tiny import build_tokenizer

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 220), "yellow": (230, 220, 50)}
QUESTION = "<image>Which colour is this?"
SIDE, NOISE = 64, 60.0
PATCH, MERGED = 16, 2
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}{%- else %}
        {%- for part in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def picture(name, chance):
    """Return an image of noise around a colour, as a data URI."""
    values = [chance.gauss(level, NOISE) for _ in range(SIDE * SIDE) for level in COLOURS[name]]
    image = PIL.Image.frombytes(
        "RGB", (SIDE, SIDE), bytes(min(255, max(0, round(value))) for value in values)
    )
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def write(file, count, seed, *, answered):
    """Write rows of images, with the right name as ground truth or, if answered, with a random one as the answer."""
    chance = random.Random(seed)
    with file.open("w", encoding="utf-8") as rows:
        for _ in range(count):
            name = chance.choice(list(COLOURS))
            told = {"completion": chance.choice(list(COLOURS))} if answered else {"ground_truth": name}
            rows.write(json.dumps({"prompt": QUESTION, "image": picture(name, chance), **told}) + "\n")


def write_model(directory):
    """Write a vision-language model with half a million random weights, its tokenizer and its image processor."""
    tokenizer = build_tokenizer([QUESTION, *COLOURS] * 8, vocab_size=637)
    marks = [AddedToken(mark, special=True, normalized=False) for mark in MARKS]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    start, image, _ = tokenizer.convert_tokens_to_ids(MARKS)
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 512,
        "initializer_range": 0.05, "tie_word_embeddings": True, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 4, 4]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": PATCH,
        "out_hidden_size": 96, "spatial_merge_size": MERGED, "temporal_patch_size": 2, "initializer_range": 0.05,
        "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64,
    }  # fmt: skip
    config = Qwen3VLConfig(
        image_token_id=image, video_token_id=len(tokenizer) + 1, vision_start_token_id=start,
        vision_end_token_id=image + 1, tie_word_embeddings=True, text_config=text, vision_config=vision,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(directory)
    pixels = (PATCH * MERGED) ** 2
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGED,
        "temporal_patch_size": 2, "size": {"shortest_edge": pixels, "longest_edge": 64 * pixels},
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_resize": True, "do_rescale": True,
        "do_normalize": True, "do_convert_rgb": True,
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(processor, indent=2), encoding="utf-8")


def main(directory):
    """Write the model, the demonstrations and the prompts below a directory."""
    (directory / "model").mkdir(parents=True)
    write_model(directory / "model")
    write(directory / "sft.jsonl", 128, "demonstrations", answered=True)
    write(directory / "train.jsonl", 256, "train", answered=False)
    write(directory / "test.jsonl", 128, "test", answered=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
