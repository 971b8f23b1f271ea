"""Models and tokenizers: no dropout, nothing random in them, and errors that say what to do."""

import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from rl4llm.backends.models import empty_model, load_model, load_tokenizer, without_dropout
from rl4llm.core.errors import ModelError


@pytest.fixture
def directory(build, tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def save_tokenizer(directory, **special):
    words = Tokenizer(WordLevel({"a": 0, "<end>": 1, "<pad>": 2, "<unk>": 3}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **special).save_pretrained(directory)
    return directory


def test_a_saved_model_loads_in_the_given_dtype_in_eval_mode(build, directory):
    model = load_model(directory, dtype="bfloat16")
    assert model.dtype == torch.bfloat16 and not model.training
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(
            load_model(str(directory))(ids).logits, build("llama")(ids).logits, atol=2e-6, rtol=1e-5
        )


def test_dropout_is_off_even_with_gradient_checkpointing(build, tmp_path):
    build("gpt2").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_pdrop"] == 0.1
    model = load_model(tmp_path, gradient_checkpointing=True)
    assert model.training
    ids = torch.tensor([[5, 6, 7, 8]])
    first, second = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert torch.equal(first, second)


def test_checkpointing_recomputes_layers_without_router_noise():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=61, num_key_value_heads=2, router_jitter_noise=0.5, **sizes)
    model, ids = MixtralForCausalLM(config), torch.tensor([[5, 6, 7, 8]])
    plain = load_model(model)(input_ids=ids).logits
    load_model(model, gradient_checkpointing=True)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    logits = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(logits, plain)
    logits.sum().backward()
    assert len(calls) == 2  # a second time for the backward pass


def test_dropout_that_was_on_is_named(build):
    assert any("attn" in name for name in without_dropout(build("gpt2")))
    assert without_dropout(build("llama")) == []


def test_a_broken_config_is_refused(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError):
        load_model(directory)


def test_missing_weights_are_not_filled_with_random_numbers(directory):
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError):
        load_model(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"intermediate_size": 56},
        {"num_hidden_layers": 1},
        {"attention_bias": False},
        {"hidden_size": "32"},
        {"num_attention_heads": 0},
    ],
)
def test_a_config_of_another_shape_is_an_error(directory, change):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError):
        load_model(directory)


def test_masks_in_the_files_of_older_models_are_left_out(build, tmp_path):
    build("gpt2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e9)
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    load_model(tmp_path)


@pytest.mark.parametrize("load", [load_model, load_tokenizer, empty_model])
def test_a_hub_name_without_a_network_is_refused_at_once(load, monkeypatch, caplog):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    started = time.monotonic()
    with pytest.raises(ModelError):
        load("nobody/no-such-model")
    assert time.monotonic() - started < 10  # the hub's own client would take 30 s
    assert not caplog.records


def test_a_tokenizer_needs_a_pad_token_that_it_has(tmp_path):
    save_tokenizer(tmp_path, eos_token="<end>")
    for pad_token in (None, "<nope>"):
        with pytest.raises(ModelError):
            load_tokenizer(tmp_path, pad_token=pad_token)
    assert load_tokenizer(tmp_path, pad_token="<pad>").pad_token_id == 2
