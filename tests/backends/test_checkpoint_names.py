"""Weights are published in the form of a Hugging Face checkpoint, whatever form they have in memory."""

import json

import pytest
import torch
import transformers
from packed import micro_batches
from safetensors.torch import load_file, save_file
from tiny_models import SIZES
from transformers.core_model_loading import Chunk, WeightConverter

from rl4llm.backends.checkpoint_names import CheckpointNames
from rl4llm.backends.lora import add_adapter
from rl4llm.backends.models import empty_model, load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import ModelError
from rl4llm.core.weights import TensorSpec

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
FAMILIES = {
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3Moe": MOE,
    "Qwen3Next": {**MOE, **LINEAR, "shared_expert_intermediate_size": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
IMAGES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_heads": 2,
    "depth": 1, "out_hidden_size": 32, "image_size": 28, "patch_size": 14,
}  # fmt: skip
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1], "mrope_interleaved": True}
AROUND = {
    "Qwen3_5": {
        "text_config": {
            **SIZES, **LINEAR, "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {**ROTARY, "partial_rotary_factor": 1.0},
        },
        "vision_config": IMAGES,
        "image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53,
    },
    "Gemma3": {
        "text_config": {**SIZES, "sliding_window": 8},
        "vision_config": IMAGES,
        "image_token_index": 50, "boi_token_index": 51, "eoi_token_index": 52, "mm_tokens_per_image": 1,
    },
    "Gemma4": {
        "text_config": {**SIZES, "global_head_dim": 8, "hidden_size_per_layer_input": 0},
        "vision_config": {**IMAGES, "head_dim": 8, "num_key_value_heads": 2},
        "image_token_id": 50, "video_token_id": 51, "audio_token_id": 52,
    },
}  # fmt: skip
IDS = torch.tensor([[3, 5, 9, 2, 40, 7, 22]])


def family(name):
    return getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**SIZES, **FAMILIES[name])
    )


@pytest.fixture
def around(tmp_path):
    """Return around("Gemma3"): a vision-language model with random weights, and the directory that it was saved in."""

    def make(name):
        config = getattr(transformers, f"{name}Config")(**AROUND[name])
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
        model.save_pretrained(tmp_path / name, max_shard_size="40KB")
        return model, tmp_path / name

    return make


def stored(directory):
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def moved(backend):
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape)
    return backend


def assert_published(backend, expected):
    published = {name: tensor.clone() for name, tensor in backend.weights()}
    assert backend.weight_specs() == [TensorSpec.of(name, tensor) for name, tensor in published.items()]
    assert published.keys() == expected.keys()
    for name, tensor in published.items():
        assert torch.equal(tensor, expected[name]), name


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_published_is_what_save_pretrained_writes(tmp_path, name):
    family(name).save_pretrained(tmp_path / "start")
    backend = moved(TorchBackend(load_model(tmp_path / "start"), lr=1e-3))
    backend.model.save_pretrained(tmp_path / "moved")
    assert_published(backend, stored(tmp_path / "moved"))
    backend.export(tmp_path / "exported")
    assert_published(backend, stored(tmp_path / "exported"))


def test_experts_are_published_one_by_one_under_an_adapter_too():
    model = load_model(family("Qwen3Moe"))
    adapted = TorchBackend(model, lr=1e-3, adapter=add_adapter(model, rank=2))
    names = {spec.name for spec in adapted.weight_specs()}
    assert {f"model.layers.1.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up", "down")} < names
    assert names == {name for name, _ in adapted.weights()}
    assert not any("lora" in name or "base_layer" in name or "gate_up" in name for name in names)


def test_weights_that_are_taken_keep_the_form_in_memory():
    one, other = (TorchBackend(load_model(family("Qwen3Moe")), lr=1e-3) for _ in range(2))
    assert not torch.equal(logits(one.model), logits(moved(other).model))
    one.take_weights(other.own_weights())
    assert torch.equal(logits(one.model), logits(other.model))


def test_a_tensor_is_published_before_the_next_one_is_read():
    model = family("Qwen3Moe")
    own = dict(model.named_parameters())
    read = []

    def reading():
        for name, tensor in own.items():
            read.append(name)
            yield name, tensor

    names = CheckpointNames(model, [TensorSpec.of(*item) for item in own.items()])
    for name, _ in names.converted(reading()):
        assert name.partition(".experts.")[0] == read[-1].partition(".experts.")[0]
    assert read == list(own)


def test_tensors_that_only_convert_together_wait_for_each_other():
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES | {"num_key_value_heads": 4}))
    parts = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    model._weight_conversions = [WeightConverter("self_attn.qkv_proj.weight", parts, [Chunk(dim=0)])]
    found = {name: tensor.clone() for name, tensor in TorchBackend(model, lr=1e-3).weights()}
    for number, layer in enumerate(model.model.layers):
        own = [layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]
        assert torch.equal(found[f"model.layers.{number}.self_attn.qkv_proj.weight"], torch.cat(own))
    assert len(found) == len(dict(model.named_parameters())) - 2 * len(model.model.layers)


@pytest.mark.parametrize("name", AROUND)
def test_the_text_of_a_vision_model_trains_and_its_whole_is_kept(around, tmp_path, name):
    whole, directory = around(name)
    text = load_model(directory)
    assert torch.allclose(logits(text), logits(whole), atol=1e-6)  # other kernels, on some processors
    assert type(empty_model(directory)) is type(text)
    assert not any("vis" in parameter for parameter, _ in text.named_parameters())
    backend = moved(TorchBackend(text, lr=1e-3))
    backend.export(tmp_path / "exported")
    assert_published(backend, stored(tmp_path / "exported"))
    assert stored(tmp_path / "exported").keys() == stored(directory).keys()
    assert (
        json.loads((tmp_path / "exported" / "config.json").read_text())["model_type"]
        == whole.config.model_type
    )
    again = type(whole).from_pretrained(tmp_path / "exported")
    assert torch.allclose(logits(again), logits(backend.model), atol=1e-6)
    assert not torch.allclose(logits(again), logits(whole), atol=1e-3)
    before = dict(whole.named_parameters())
    kept = {
        key: tensor
        for key, tensor in again.named_parameters()
        if "language_model" not in key and "lm_head" not in key
    }
    assert len(kept) > 5
    assert all(torch.equal(tensor, before[key]) for key, tensor in kept.items())
    assert torch.equal(logits(load_model(tmp_path / "exported")), logits(backend.model))


def published_by(ranks, directory, target):
    """What the first of several ranks publishes and exports of a model that they share."""
    backend = TorchBackend(load_model(directory, shared_by=ranks), ranks=ranks, shard="fsdp2", device="cpu")
    found = {
        name: tensor.clone()
        for name, tensor in (backend.weights if ranks.is_first else backend.own_weights)()
    }
    backend.export(target)
    return found


def test_ranks_that_share_the_text_publish_the_vision_model(on_ranks, around, tmp_path):
    _, directory = around("Gemma3")
    first, _ = on_ranks(published_by, directory, tmp_path / "exported")
    assert first.keys() == stored(directory).keys()
    for expected in (stored(directory), stored(tmp_path / "exported")):
        assert all(torch.equal(first[name], tensor) for name, tensor in expected.items())


def test_the_text_of_a_vision_model_takes_a_step(around, trajectories):
    _, directory = around("Gemma3")
    backend = TorchBackend(load_model(directory), lr=1e-2)
    for batch in micro_batches(trajectories):
        backend.forward_backward(batch, lambda batch, logp_BT, _: (-logp_BT, {}))
    assert backend.optim_step()["grad_norm"] > 0
    before = stored(directory)
    moved = {name for name, tensor in backend.weights() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.startswith("language_model.")}


@pytest.mark.parametrize("name", AROUND)
def test_an_adapter_of_the_text_fits_the_whole_vision_model(around, tmp_path, name):
    peft = pytest.importorskip("peft")
    whole, directory = around(name)
    text = load_model(directory)
    backend = TorchBackend(text, lr=1e-3, adapter=add_adapter(text, rank=2))
    with torch.no_grad():
        for _, tensor in backend.adapter.parameters():
            tensor += 0.1 * torch.randn(tensor.shape)
    backend.write_adapter(tmp_path)
    expected, before = logits(text), logits(whole)
    found = logits(peft.PeftModel.from_pretrained(whole, tmp_path))
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(found, before, atol=1e-3)


def test_an_old_copy_of_a_tied_tensor_is_not_published(around):
    _, directory = around("Gemma3")
    index = directory / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    name = "language_model.model.embed_tokens.weight"
    file = directory / listed["weight_map"][name]
    tensors = load_file(file)
    save_file({**tensors, "language_model.lm_head.weight": tensors[name].clone()}, file, {"format": "pt"})
    listed["weight_map"]["language_model.lm_head.weight"] = file.name
    index.write_text(json.dumps(listed))
    backend = TorchBackend(load_model(directory), lr=1e-3)
    assert {spec.name for spec in backend.weight_specs()} == listed["weight_map"].keys() - {
        "language_model.lm_head.weight"
    }


def test_a_text_model_ties_as_the_whole_does(tmp_path):
    images = {name: IMAGES[name] for name in IMAGES if name not in ("num_heads", "depth", "out_hidden_size")}
    config = transformers.Mistral3Config(
        text_config={**SIZES, "model_type": "mistral"},
        vision_config={**images, "model_type": "pixtral", "head_dim": 8},
    )
    assert config.tie_word_embeddings and not config.text_config.tie_word_embeddings
    whole = transformers.Mistral3ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load_model(tmp_path)), logits(whole), rtol=0, atol=1e-6)


def test_a_model_without_a_class_for_its_text_is_refused_by_name(tmp_path):
    text = SIZES | {"rope_parameters": ROTARY | {"mrope_section": [2, 1, 1]}}
    config = transformers.Glm4vConfig(
        text_config=text, vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2}
    )
    config.architectures = ["Glm4vForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for load in (load_model, empty_model):
        with pytest.raises(ModelError):
            load(tmp_path)


def test_a_vision_model_without_its_text_is_refused_by_name(around):
    _, directory = around("Gemma4")
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("embed_tokens.weight", "words.weight"))
    with pytest.raises(ModelError):
        load_model(directory)


def change_text(directory, change):
    """Change the stored tensors of the text's query projections: `change` returns new ones by name."""
    index = directory / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    for place in set(listed["weight_map"].values()):
        tensors = load_file(directory / place)
        for name in [name for name in tensors if "language_model" in name and name.endswith("q_proj.weight")]:
            tensors |= change(name, tensors[name])
        save_file(tensors, directory / place, {"format": "pt"})
        listed["weight_map"] |= dict.fromkeys(tensors, place)
    index.write_text(json.dumps(listed))


def test_a_quantized_vision_model_is_refused_by_name(around):
    _, directory = around("Gemma3")
    change_text(directory, lambda name, tensor: {name: tensor.to(torch.float8_e4m3fn)})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    for load in (load_model, empty_model):
        with pytest.raises(ModelError):
            load(directory)


@pytest.mark.parametrize("name", AROUND)
def test_tensors_that_the_text_model_lacks_are_refused(around, name):
    _, directory = around(name)
    change_text(directory, lambda name, tensor: {f"{name}_scale_inv": torch.ones(1)})
    with pytest.raises(ModelError):
        load_model(directory)


def test_projections_of_shared_layers_may_be_in_the_files(tmp_path):
    text = AROUND["Gemma4"]["text_config"] | {
        "num_kv_shared_layers": 1,
        "layer_types": ["full_attention"] * 2,
    }
    config = transformers.Gemma4Config(**AROUND["Gemma4"] | {"text_config": text})
    transformers.Gemma4ForConditionalGeneration(config).save_pretrained(tmp_path)
    tensors, unused = stored(tmp_path), "model.language_model.layers.1.self_attn.k_proj.weight"
    assert unused not in tensors
    save_file({**tensors, unused: torch.ones(16, 32)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert not any("layers.1.self_attn.k_proj" in name for name, _ in load_model(tmp_path).named_parameters())
