from functools import partial

import pytest
import torch
from torch import nn

from rl4llm.backends.lora import add_adapter
from rl4llm.backends.models import load_model
from rl4llm.core.errors import EngineError
from rl4llm.inference.embedded.kv_cache import KVCache, TokenCache, Window
from rl4llm.inference.embedded.llama_decode import LlamaDecoder, UnsupportedModelError
from rl4llm.inference.embedded.model_decode import ModelDecoder
from rl4llm.inference.embedded.static_decode import StaticStep
from rl4llm.inference.local import LocalClient
from rl4llm.inference.paths import choose_decoder, context_limit, prove


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "llama3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_llama_family_takes_the_fast_path(build, name, dtype):
    assert choose_decoder(build(name).to(dtype), "auto", 96).decoder.name == "fast"


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "gemma2", "llama_dynamic"])
def test_other_architectures_take_their_own_forward_and_say_why(build, name):
    choice = choose_decoder(build(name), "auto", 64)
    assert choice.decoder.name == "model"
    assert "the fast path does not fit, since" in choice.reason


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "gemma2", "llama_dynamic"])
def test_the_models_own_forward_over_our_cache_is_proven_too(build, name):
    model = build(name)
    assert prove(model, ModelDecoder(model), 64).difference < 1e-5


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
    model.model.embed_tokens.__class__ = type(
        "Scaled", (nn.Embedding,), {"forward": lambda self, x: self.weight[x] * 2}
    )


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_altered_model_falls_back_to_its_own_forward(build, alter, dtype):
    model = build("qwen3")
    alter(model)
    model.to(dtype)
    assert choose_decoder(model, "auto", 96).decoder.name == "model"
    with pytest.raises(EngineError):
        choose_decoder(model, "fast", 96)


def test_a_decoder_notices_that_modules_were_replaced(build):
    model = build("qwen3")
    decoder = LlamaDecoder(model, 96)
    assert decoder.serves(model)
    model.lm_head.weight.data = model.lm_head.weight.data + 1
    assert decoder.serves(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data)
    assert not decoder.serves(model)


def test_a_window_shortens_no_context_but_leaves_the_fast_path(build):
    model = build("mistral", sliding_window=40)
    assert context_limit(model, None) == (96, "max_position_embeddings")
    assert choose_decoder(model, "auto", 40).decoder.name == "fast"
    choice = choose_decoder(model, "auto", 41)
    assert choice.decoder.name == "model"
    assert "its window of 40 tokens is shorter than the context of 41" in choice.reason


def test_the_context_is_at_most_what_the_model_allows(build):
    assert context_limit(build("qwen2"), None) == (96, "max_position_embeddings")
    assert context_limit(build("qwen2"), 50) == (50, "context_length")
    with pytest.raises(EngineError):
        context_limit(build("qwen2"), 97)


def test_layers_that_the_engine_cannot_cache_are_refused_by_name():
    from transformers import FalconH1Config, FalconH1ForCausalLM, MambaConfig, MambaForCausalLM

    small = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 50}
    both = FalconH1ForCausalLM(FalconH1Config(**small, num_attention_heads=2, num_key_value_heads=2))
    with pytest.raises(EngineError):
        context_limit(both, 64)
    with pytest.raises(EngineError):  # it takes no past_key_values
        choose_decoder(MambaForCausalLM(MambaConfig(**small)), "auto", 64)


def test_a_slower_path_that_nobody_chose_is_reported(build, tokenizer):
    for name, path, lines in (("gpt2", "auto", 1), ("gpt2", "model", 0), ("llama", "auto", 0)):
        warned = []
        LocalClient(build(name), tokenizer, path=path).report_to(warned.append)
        assert len(warned) == lines, name
        assert all("GPT2LMHeadModel is not one of LlamaForCausalLM" in text for text in warned)


def test_a_step_that_cannot_be_captured_runs_as_it_is(build):
    model = build("qwen3")
    decoder = choose_decoder(model, "graph", 96).decoder
    decoder._captures = True  # as on a GPU
    decoder.refresh()
    with pytest.warns(UserWarning, match="Decoding runs without CUDA graphs"):
        prove(model, decoder, 96)
    prove(model, decoder, 96)


def test_a_fixed_shape_needs_a_model_of_the_fast_path(build):
    with pytest.raises(EngineError):
        choose_decoder(build("gpt2"), "graph", 96)


def adapt(model, targets=()):
    """Add an adapter that changes what the model computes."""
    adapter = add_adapter(model, rank=3, targets=targets, seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3)
    return adapter


@pytest.mark.parametrize("path", ["fast", "graph"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_fast_paths_apply_an_adapter_in_the_projections(build, path, autocast):
    model = build("qwen2")
    plain = prove(model, choose_decoder(model, path, 96, autocast).decoder, 96, autocast)
    adapt(model, targets=["q_proj", "v_proj", "down_proj"])  # a product of three parts has an adapter on two
    decoder = choose_decoder(model, path, 96, autocast).decoder
    assert (
        decoder.name == path and prove(model, decoder, 96, autocast).difference < 3 * plain.difference + 1e-5
    )
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.mul_(-2)
    decoder.refresh()
    assert (
        decoder.serves(model) and prove(model, decoder, 96, autocast).difference < 3 * plain.difference + 1e-5
    )


def test_an_unusual_adapter_takes_the_models_own_forward(build):
    model = build("qwen2")
    adapter = adapt(model)
    with adapter.off():
        reason = choose_decoder(model, "auto", 96).reason
    assert "peft.tuners.lora.layer.Linear, not a plain nn.Linear with at most one plain adapter" in reason


def test_another_scaling_of_an_adapter_makes_another_decoder(build):
    model = build("qwen2")
    adapt(model)
    decoder = choose_decoder(model, "fast", 96).decoder
    assert decoder.serves(model)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)
    assert not decoder.serves(model)


@pytest.mark.parametrize("make", [KVCache, partial(TokenCache, prefixes=None, spare=1)])
def test_a_growing_cache_keeps_its_content(make):
    cache = make(torch.float32, torch.device("cpu"))
    cache.reserve(3, 64)
    for layer in range(2):
        cache.window = Window(cache, 0, [0, 0, 0], 3)
        cache.update(layer, torch.full((3, 1, 3, 8), 1.0 + layer), torch.full((3, 1, 3, 8), -1.0))
    cache.reserve(5, 65)
    assert cache.capacity == 128 and cache.rows == (8 if make is not KVCache else 5)
    for layer in range(2):
        keys, values = cache.read(layer, 3, 3)
        assert keys.eq(1 + layer).all() and values.eq(-1).all()
        assert not cache.read(layer, 5, 128)[0][3:].any()


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_gradient_checkpointing_keeps_the_fast_path(build, name):
    model = load_model(build(name), gradient_checkpointing=True)
    model.enable_input_require_grads()  # as TRL and PEFT do: a hook on the embedding
    assert model.training and any(module._forward_hooks for module in model.modules())
    assert choose_decoder(model, "auto", 96).decoder.name == "fast"


def test_the_proof_finds_a_step_that_repeats_its_first_inputs(build):
    model = build("qwen3")
    decoder = choose_decoder(model, "graph", 96).decoder
    place = StaticStep.place

    def stuck(self, tokens_B, positions_B):
        if not hasattr(self, "placed"):
            self.placed = tokens_B.clone(), positions_B.clone()
        place(self, *self.placed)

    decoder.rest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticStep, "place", stuck)
        with pytest.raises(UnsupportedModelError):
            prove(model, decoder, 96)
