"""The two models that all benchmarks measure, random weights, and prompts and a tokenizer for them."""

from __future__ import annotations

from typing import Any

import torch

PROMPT_TOKENS = 64
SHAPES = {
    "1m": {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 512, "vocab_size": 512,
    },
    "30m": {
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "intermediate_size": 1536, "vocab_size": 4096,
    },
}  # fmt: skip


def build_model(size: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A Qwen3-class causal LM of about 1 or 30 million parameters ("1m", "30m"), in evaluation mode; `changes` to its shape
    make another one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        **SHAPES[size] | changes,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).to(dtype).eval()


def build_tokenizer(size: str) -> Any:
    """A tokenizer of one word per id, as large as the model's vocabulary; 0, 1, 2 are pad, bos and eos."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>"] + [f"w{number}" for number in range(3, SHAPES[size]["vocab_size"])]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def build_prompts(size: str, count: int, length: int = PROMPT_TOKENS, seed: int = 1) -> list[list[int]]:
    """Random prompts of equal length, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SHAPES[size]["vocab_size"], (count, length), generator=generator).tolist()
