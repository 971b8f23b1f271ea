"""Tiny real models, and trajectories of a few turns with a shared prompt."""

import pytest
import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rl4llm.core.types import TokenSpan, Trajectory

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "phimoe": lambda: PhimoeForCausalLM(PhimoeConfig(**SIZES, num_local_experts=4)),
    "falcon_h1": lambda: FalconH1ForCausalLM(
        FalconH1Config(**SIZES, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=16)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, sliding_window=64, final_logit_softcapping=5.0, attn_logit_softcapping=20.0)
    ),
    "qwen3_5": lambda: Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **SIZES, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=1,
            embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1,
        )
    ),
}  # fmt: skip


@pytest.fixture
def build():
    """Return build("qwen3"): a model with random weights, the same every time, large enough to tell tokens apart."""

    def make(name="qwen3"):
        torch.manual_seed(7)
        model = MODELS[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model.eval()

    return make


@pytest.fixture
def trajectories():
    """Return 4 prompts x 3 samples of one or two turns, lengths all different, with credits of both signs."""
    generator = torch.Generator().manual_seed(3)

    def tokens(low, high):
        count = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(2, VOCABULARY, (count,), generator=generator).tolist())

    def policy(low, high):
        ids = tokens(low, high)
        return TokenSpan(ids, "policy", tuple((-3 * torch.rand(len(ids), generator=generator)).tolist()), 0)

    def sample(prompt, turns):
        spans = [TokenSpan.context(prompt), policy(1, 9)]
        for _ in range(turns - 1):
            spans += [TokenSpan.context(tokens(1, 4)), policy(1, 7)]
        return tuple(spans)

    found = []
    for number in range(4):
        prompt = tokens(3, 9)
        for turns in (1, 2, 1):
            spans = sample(prompt, turns)
            if number == 3:  # ends with the environment's words, which teach nothing
                spans += (TokenSpan.context(tokens(1, 3)),)
            found.append(Trajectory(f"p{number}", spans, (), {}, 0.0, "stop"))
    return found
