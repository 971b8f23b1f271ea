"""Tiny random models of many architectures, and the plain forward loop that the engine must agree with."""

import pytest
import torch
import transformers
from vision_models import seen, some_vision_directory, vision_directories  # noqa: F401 - fixtures

from rl4llm.inference.embedded import kv_cache
from rl4llm.inference.embedded.sampling import uniforms

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
ARCHITECTURES = {
    "qwen2": ("Qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16}),
    "llama": ("Llama", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", {**GROUPED, "rope_parameters": LLAMA3_ROPE}),
    "llama_dynamic": ("Llama", {**GROUPED, "rope_parameters": DYNAMIC_ROPE}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": None}),
    "gpt_neox": ("GPTNeoX", SMALL),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "initializer_range": 0.2}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 16, "sliding_window": 64}),
}
FAST = ("qwen2", "qwen3", "llama", "llama3", "mistral")


def make_model(name, vocab_size, **changes):
    kind, options = ARCHITECTURES[name]
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{kind}Config")(
        **{**options, "vocab_size": vocab_size, **ends, **changes}
    )
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    return getattr(transformers, kind + head)(config).eval()


@pytest.fixture(autouse=True)
def _unequal_rows_are_apart(monkeypatch):
    """Let short rows be split into parts, as rows are that differ by hundreds of tokens."""
    monkeypatch.setattr(kv_cache, "PADDING", 1)


@pytest.fixture
def build(tokenizer):
    """Build a model by the name of its architecture."""
    return lambda name, **changes: make_model(name, len(tokenizer), **changes)


def kept(probs, params):
    """Filter by top-k and top-p, token by token, as the reference."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    order = order[: params.top_k or len(order)]
    total = sum(probs[token] for token in order)
    result, held = [0.0] * len(probs), 0.0
    for token in order:
        if held >= params.top_p * total and params.top_p < 1:
            break
        result[token] = probs[token]
        held += probs[token]
    return result


def plain_loop(model, prompt_ids, params, stop_ids=()):
    """Sample in a loop that runs the model's own forward over all tokens for each new one; return tokens and log-probs."""
    ids, logprobs = list(prompt_ids), []
    while len(logprobs) < params.max_tokens:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
        logprobs_V = (logits / (params.temperature or 1.0)).log_softmax(-1)
        token = int(logits.argmax())
        if params.temperature:
            cdf = torch.tensor(kept(logprobs_V.exp().double().tolist(), params), dtype=torch.float64).cumsum(
                -1
            )
            target = float(uniforms([params.seed], [len(logprobs)], 1)[0, 0]) * cdf[-1]
            token = int((cdf <= target).sum())
        ids.append(token)
        logprobs.append(float(logprobs_V[token]))
        if token in stop_ids:
            break
    return ids[len(prompt_ids) :], logprobs


@pytest.fixture
def reference():
    return plain_loop


@pytest.fixture
def reference_filter():
    return kept
