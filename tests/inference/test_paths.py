import pytest
import torch
from torch import nn

from rl4llm.core.errors import EngineError
from rl4llm.inference.llama_decode import LlamaDecoder
from rl4llm.inference.model_decode import ModelDecoder
from rl4llm.inference.paths import choose_decoder, context_limit, prove


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "llama3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_llama_family_takes_the_fast_path(build, name, dtype):
    assert choose_decoder(build(name).to(dtype), "auto", 96).decoder.name == "fast"


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "gemma2", "llama_dynamic"])
def test_other_architectures_take_their_own_forward_and_say_why(build, name):
    choice = choose_decoder(build(name), "auto", 64)
    assert choice.decoder.name == "model"
    assert "fast path does not fit" in choice.reason


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "gemma2", "llama_dynamic"])
def test_the_models_own_forward_over_our_cache_is_proven_too(build, name):
    model = build(name)
    assert prove(model, ModelDecoder(model), 64) < 1e-5


class DoubledOutput(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def replace_a_projection(model):
    own = model.model.layers[1].mlp.down_proj
    model.model.layers[1].mlp.down_proj = DoubledOutput(own.in_features, own.out_features, bias=False)


def hook_a_layer(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)


def change_the_attention_scale_of_one_layer(model):
    model.model.layers[1].self_attn.scaling *= 1.3


def scale_the_embedding_in_forward(model):
    model.model.embed_tokens.__class__ = type("Scaled", (nn.Embedding,), {"forward": lambda self, x: self.weight[x] * 2})


def change_the_activation(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


@pytest.mark.parametrize(
    "alter",
    [
        replace_a_projection,
        hook_a_layer,
        change_the_attention_scale_of_one_layer,
        scale_the_embedding_in_forward,
        change_the_activation,
    ],
)
def test_an_altered_model_falls_back_to_its_own_forward(build, alter):
    model = build("qwen3")
    alter(model)
    assert choose_decoder(model, "auto", 96).decoder.name == "model"
    with pytest.raises(EngineError, match="path='fast' is impossible"):
        choose_decoder(model, "fast", 96)


def test_a_decoder_notices_that_modules_were_replaced(build):
    model = build("qwen3")
    decoder = LlamaDecoder(model)
    assert decoder.serves(model)
    model.lm_head.weight.data = model.lm_head.weight.data + 1
    assert decoder.serves(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data)
    assert not decoder.serves(model)


def test_an_unknown_path_is_refused_with_a_suggestion(build):
    with pytest.raises(EngineError, match="Did you mean 'fast'"):
        choose_decoder(build("qwen3"), "fats", 96)


def test_a_sliding_window_limits_the_context(build):
    assert context_limit(build("mistral", sliding_window=40), None) == (40, "sliding_window")
    with pytest.raises(EngineError, match="sliding_window of the model allows 40"):
        context_limit(build("mistral", sliding_window=40), 64)


def test_the_context_is_at_most_what_the_model_allows(build):
    assert context_limit(build("qwen2"), None) == (96, "max_position_embeddings")
    assert context_limit(build("qwen2"), 50) == (50, "context_length")
    with pytest.raises(EngineError, match="max_position_embeddings of the model allows 96"):
        context_limit(build("qwen2"), 97)


def test_a_recurrent_model_is_refused_by_name():
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50))
    with pytest.raises(EngineError, match="MambaForCausalLM keeps"):
        context_limit(model, 64)
