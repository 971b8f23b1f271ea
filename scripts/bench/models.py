"""The models that the benchmarks measure, with random weights, and prompts and a tokenizer for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PROMPTS, PROMPT_TOKENS = 16, 64  # of a step
SHAPES = {
    "1m": {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 512, "vocab_size": 512,
    },
    "5m": {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 768, "vocab_size": 4096,
    },
    "30m": {
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "intermediate_size": 1536, "vocab_size": 4096,
    },
    "400m": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 4864, "vocab_size": 32768,
    },
}  # fmt: skip


def build_model(size: str) -> Any:
    """Return a Qwen3-class causal LM of about as many parameters as its name says, in evaluation mode."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPES[size],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def build_tokenizer(size: str) -> Any:
    """A tokenizer of one word per id, as large as the model's vocabulary; 0, 1, 2 are pad, bos and eos."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>"] + [f"w{number}" for number in range(3, SHAPES[size]["vocab_size"])]
    words = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def load_model(directory: str) -> tuple[Any, Any]:
    """A pretrained causal LM in float32, in evaluation mode, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def build_prompts(vocabulary: int, count: int, length: int = PROMPT_TOKENS, seed: int = 1) -> list[list[int]]:
    """Random prompts of equal length, without special tokens and without the last one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary - 1, (count, length), generator=generator).tolist()


def word_prompts(tokenizer: Any, count: int, length: int = PROMPT_TOKENS, seed: int = 1) -> list[str]:
    """Prompts of random words that are one token each."""
    words = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    words = [word for word in words if word[0] == " " and word[1:].isalpha() and word.isascii()]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(words), (count, length), generator=generator).tolist()
    return ["".join(words[number] for number in numbers) for numbers in chosen]


def processor() -> str:
    """Return the processor's name and the number of threads."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name}, {torch.get_num_threads()} threads"
