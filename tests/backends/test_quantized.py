"""A frozen base in 4 bits: the numbers of the dequantized model, in the trainer, the engine and in what is exported."""

import copy
import json

import pytest
import torch
from packed import micro_batches as batches_of
from packed import policy_gradient
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from rl4llm.backends.lora import FrozenModel, add_adapter
from rl4llm.backends.models import check_finite, load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import CheckpointError, ConfigError, ModelError
from rl4llm.core.weights import TensorSpec
from rl4llm.inference.paths import choose_decoder
from rl4llm.runtime import quantized
from rl4llm.runtime.quantized import QuantizedLinear, nf4, quantized_layers

pytest.importorskip(
    "bitsandbytes", reason="bitsandbytes is not installed: pip install 'rl4llm[bitsandbytes]'"
)
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "qwen3_5"]


def in_4_bits(model, **options):
    return load_model(model, nf4_skips=[], device="cpu", **options)


def adapted(model, *, lr=0.02, seed=0, optimizer="adamw", **options):
    return TorchBackend(
        model, lr=lr, optimizer=optimizer, adapter=add_adapter(model, rank=4, seed=seed, **options)
    )


def dequantized(model):
    """Return the plain model whose weights are the dequantized ones, which bitsandbytes computes."""
    functional = quantized._bitsandbytes().functional
    plain = copy.deepcopy(model)
    for name, layer in quantized_layers(model).items():
        linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        linear.weight.data = functional.dequantize_4bit(layer.packed, layer.state)
        linear.bias = layer.bias
        plain.set_submodule(name, linear)
    return plain


def train(backend, batches, steps=2):
    for _ in range(steps):
        for batch in batches:
            backend.forward_backward(batch, policy_gradient)
        metrics = backend.optim_step()
    return metrics


def logprobs(backend, batches):
    return torch.cat([backend.forward(batch)[batch.mask_BT] for batch in batches])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["sorted", "shared"])
def test_gradients_equal_those_of_the_dequantized_model(build, trajectories, family, layout):
    model = in_4_bits(build(family))
    assert len(quantized_layers(model)) >= 2 * 5
    plain, backend = adapted(load_model(dequantized(model), device="cpu")), adapted(model)
    for batch in batches_of(trajectories, layout):
        for each in (plain, backend):
            each.forward_backward(batch, policy_gradient)
    grads = [
        {name: item.grad for name, item in each.model.named_parameters() if item.requires_grad}
        for each in (plain, backend)
    ]
    assert grads[0].keys() == grads[1].keys()
    assert max(gradient.abs().max() for gradient in grads[0].values()) > 1e-2
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, atol=1e-6, rtol=0)
    batches = batches_of(trajectories, layout)
    torch.testing.assert_close(logprobs(backend, batches), logprobs(plain, batches), atol=1e-6, rtol=0)


def test_only_the_adapter_changes_trains_and_is_saved(build, trajectories, tmp_path):
    batches, model = batches_of(trajectories), in_4_bits(build("qwen2"))
    backend = adapted(model)
    before = {name: tensor.clone() for name, tensor in backend.adapter.base_parameters()}
    packed = {name: layer.packed.clone() for name, layer in quantized_layers(model).items()}
    train(backend, batches)
    for name, tensor in backend.adapter.base_parameters():
        assert torch.equal(tensor, before[name]), name
    assert all(torch.equal(layer.packed, packed[name]) for name, layer in quantized_layers(model).items())
    assert all("lora_" in name for name in backend.stepped)
    assert all("lora_" in name for name, item in model.named_parameters() if item.grad is not None)
    backend.save(tmp_path)
    assert all("lora_" in name for name in load_file(tmp_path / "weights.safetensors"))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_run_in_4_bits_resumes_bit_for_bit(build, trajectories, tmp_path, optimizer):
    batches = batches_of(trajectories)
    backend = adapted(in_4_bits(build()), seed=1, optimizer=optimizer)
    train(backend, batches)
    backend.save(tmp_path)
    other = adapted(in_4_bits(build()), seed=2, optimizer=optimizer)
    other.load(tmp_path)
    for one in (backend, other):
        train(one, batches)
    for (name, tensor), (_, again) in zip(backend.weights(), other.weights(), strict=True):
        assert torch.equal(tensor, again), name


def test_an_adapter_of_another_quantization_is_refused(build, trajectories, tmp_path):
    backend = adapted(in_4_bits(build()))
    train(backend, batches_of(trajectories))
    backend.save(tmp_path)
    with pytest.raises(CheckpointError):
        adapted(load_model(build(), device="cpu")).load(tmp_path)
    with pytest.raises(CheckpointError):
        adapted(load_model(build(), nf4_skips=["down_proj"], device="cpu")).load(tmp_path)


def test_the_reference_is_the_base_in_4_bits(build, trajectories):
    batches, model = batches_of(trajectories), in_4_bits(build())
    alone = TorchBackend(load_model(dequantized(model), device="cpu"), lr=0.0)
    backend = adapted(model)
    train(backend, batches)
    reference = FrozenModel(backend, backend.adapter)
    torch.testing.assert_close(logprobs(reference, batches), logprobs(alone, batches), atol=1e-6, rtol=0)
    assert (logprobs(backend, batches) - logprobs(alone, batches)).abs().max() > 1e-2


@pytest.mark.parametrize("stored", [False, True])
def test_a_reference_takes_the_weights_of_a_4_bit_policy(build, trajectories, tmp_path, stored):
    """Its layers that are in 4 bits come last in the policy's order, not in that of the reference."""
    model, skips = build("qwen2"), []
    if stored:
        model.save_pretrained(tmp_path / "plain")
        config = nf4(load_model(tmp_path / "plain", device="cpu"), [])
        model, skips = tmp_path / "stored", None
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "plain", quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
        ).save_pretrained(model)
    policy = adapted(load_model(copy.deepcopy(model), nf4_skips=skips, device="cpu"), lr=0.1)
    reference = TorchBackend(load_model(model, nf4_skips=skips, packed=False, device="cpu"), trains=False)
    start = {name: tensor.clone() for name, tensor in policy.own_weights()}
    assert [*start] != [name for name, _ in reference.own_weights()]
    for rate in (0.0, 0.25, 1.0):
        reference.take_weights(policy.own_weights(), rate)
        policy_weights, taken = dict(policy.own_weights()), dict(reference.own_weights())
        assert policy_weights.keys() == taken.keys()
        for name, tensor in taken.items():
            expected = start[name].lerp(policy_weights[name], rate)
            torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)
        if not rate:
            train(policy, batches_of(trajectories))
            assert any(not torch.equal(tensor, start[name]) for name, tensor in policy.own_weights())


@pytest.mark.parametrize("path", ["fast", "model"])
@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_the_engine_computes_with_the_trainers_numbers(build, trajectories, path, autocast):
    model = in_4_bits(build("qwen3"))
    backend = adapted(model)
    train(backend, batches_of(trajectories))
    dtype = {"none": None, "bfloat16": torch.bfloat16}[autocast]
    found = choose_decoder(
        model, path, 128, dtype
    )  # raises if log-probs are farther from the model's own than any path's
    assert found.decoder.name == path
    if path == "fast":
        copied = [part._copied for part in found.decoder._parts() if hasattr(part, "_copied")]
        assert sum(item is not None for item in copied) <= 1  # the output layer: no second model in 16 bits


def test_exported_weights_compute_what_the_policy_does(build, trajectories, tmp_path):
    batches = batches_of(trajectories)
    model = in_4_bits(build("qwen2"))  # with tied embeddings
    backend = adapted(model)
    train(backend, batches)
    plain = TorchBackend(load_model(build("qwen2"), device="cpu"), lr=0.0)
    specs = backend.weight_specs()
    assert sorted(specs, key=str) == sorted(plain.weight_specs(), key=str)
    assert specs == [TensorSpec.of(name, tensor) for name, tensor in backend.weights()]
    backend.export(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    exported = TorchBackend(load_model(tmp_path, device="cpu"), lr=0.0)
    torch.testing.assert_close(logprobs(exported, batches), logprobs(backend, batches), atol=1e-5, rtol=0)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is type(model)


def test_rounding_of_merged_weights_is_measured(build, trajectories):
    backend = adapted(in_4_bits(build(), dtype="bfloat16"))
    train(backend, batches_of(trajectories))
    plain, merged = dict(backend.adapter.base_parameters()), dict(backend.weights())
    moved = {name: layer.get_delta_weight("default") for name, layer in backend.adapter._adapted.items()}
    lost = sum(
        (merged[name].float() - plain[name].float() - change).square().sum() for name, change in moved.items()
    )
    share = float((lost / sum(change.square().sum() for change in moved.values())).sqrt().detach())
    assert 0.005 < share < 0.5 and backend.adapter.lost_by_merging() == pytest.approx(share, rel=1e-3)
    exact = adapted(in_4_bits(build()))
    train(exact, batches_of(trajectories))
    assert exact.adapter.lost_by_merging() < 1e-5


def test_layers_of_experts_keep_their_names_in_files(build, trajectories, tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    plain, backend = TorchBackend(load_model(tmp_path, device="cpu"), lr=0.1), adapted(in_4_bits(tmp_path))
    assert sorted(map(str, backend.weight_specs())) == sorted(map(str, plain.weight_specs()))
    assert backend.warnings()[-1].startswith("model.layers.0.mlp.experts")
    train(backend, batches_of(trajectories))


def test_files_and_objects_load_as_the_same_4_bits(build, tmp_path):
    build("qwen2").save_pretrained(tmp_path / "plain")
    named = in_4_bits(tmp_path / "plain")
    config = nf4(build("qwen2"), [])
    stored = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )
    stored.save_pretrained(tmp_path / "stored")
    ways = [
        named,
        in_4_bits(build("qwen2")),
        load_model(tmp_path / "stored", device="cpu"),
        load_model(stored, device="cpu"),
    ]
    first = quantized_layers(named)
    assert (
        first
        and isinstance(named.lm_head, torch.nn.Linear)
        and not isinstance(named.lm_head, QuantizedLinear)
    )
    assert named.lm_head.weight is named.model.embed_tokens.weight
    for model in ways[1:]:
        assert quantized_layers(model).keys() == first.keys()
        for name, layer in quantized_layers(model).items():
            assert torch.equal(layer.weight, first[name].weight), name
        assert not hasattr(model.config, "quantization_config")
        assert adapted(model).weight_specs() == adapted(copy.deepcopy(named)).weight_specs()


def test_experts_in_mxfp4_train_with_their_dequantized_weights(tmp_path):
    sizes = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "head_dim": 16,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    GptOssForCausalLM(GptOssConfig(**sizes, **heads, **ends)).save_pretrained(tmp_path)
    table = torch.tensor(
        [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    )  # of E2M1 without its sign, by the OCP MX specification
    table = torch.cat([table, -table])
    expected = load_file(tmp_path / "model.safetensors")
    stored = dict(expected)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in expected if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, outer = stored.pop(name).shape
        packed = torch.randint(256, (experts, outer, inner // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, packed.shape[:3], dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": packed, f"{name}_scales": scales}
        numbers = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], -1).flatten(3)
        numbers = numbers * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = numbers.reshape(experts, outer, inner).transpose(1, 2)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = dict(TorchBackend(load_model(tmp_path, device="cpu"), lr=0.1).weights())
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name


def test_an_object_that_has_computed_keeps_its_weights(tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(tmp_path)
    config = nf4(load_model(tmp_path, device="cpu"), [])
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    ).eval()
    with torch.no_grad():
        loaded(torch.ones(1, 3, dtype=torch.long))  # on some processors this changes the order of the weights
    first = quantized_layers(in_4_bits(tmp_path))
    for name, layer in quantized_layers(
        load_model(loaded, device="cpu")
    ).items():  # and rounds their scales to bf16
        torch.testing.assert_close(layer.weight, first[name].weight, rtol=0.01, atol=1e-5)


def test_fp8_files_train_with_their_dequantized_weights(build, trajectories, tmp_path):
    build().save_pretrained(tmp_path)
    stored, expected = {}, load_file(tmp_path / "model.safetensors")
    for name, tensor in list(expected.items()):
        stored[name] = tensor
        if name.endswith("proj.weight"):
            scale = tensor.abs().max().reshape(1, 1) / 448  # the largest number of this format
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"], expected[name] = scale, stored[name].float() * scale
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    backend = TorchBackend(load_model(tmp_path, device="cpu"), lr=0.1)
    assert {name: tuple(tensor.shape) for name, tensor in expected.items()} == {
        spec.name: spec.shape for spec in backend.weight_specs()
    }
    for name, tensor in backend.weights():
        assert torch.equal(tensor, expected[name]), name
    train(backend, batches_of(trajectories))
    backend.export(tmp_path / "exported")
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())
    again = TorchBackend(load_model(tmp_path / "exported", device="cpu"), lr=0.1)
    assert all(
        torch.equal(one, two) for (_, one), (_, two) in zip(backend.weights(), again.weights(), strict=True)
    )
    assert quantized_layers(in_4_bits(tmp_path))


def test_4_bits_take_a_seventh_of_float32(build):
    plain, model = build(), in_4_bits(build())
    layers = quantized_layers(model)
    numbers = sum(layer.in_features * layer.out_features for layer in layers.values())
    assert sum(layer.packed.nbytes for layer in layers.values()) == numbers // 2
    assert not {name for name, _ in model.named_parameters()} & {f"{name}.weight" for name in layers}
    assert sum(item.numel() for item in model.parameters()) + numbers == sum(
        x.numel() for x in plain.parameters()
    )


def stepped(ranks, model, trajectories, optimizer):
    """Return the merged weights after three steps; each rank trains on the same batch."""
    (batch,) = batches_of(trajectories, budget=1000)
    model = in_4_bits(model)
    backend = TorchBackend(
        model, ranks=ranks, adapter=add_adapter(model, rank=128, seed=1), lr=1e-2, optimizer=optimizer
    )
    for _ in range(3):
        backend.forward_backward(batch, policy_gradient)
        backend.optim_step()
    return {name: tensor.clone() for name, tensor in backend.weights()}


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_ranks_take_the_same_steps_over_4_bits(on_ranks, build, trajectories, optimizer):
    one, other = on_ranks(stepped, build(), trajectories, optimizer)
    moved = {
        name: (tensor - dict(build().named_parameters())[name]).abs().max() for name, tensor in one.items()
    }
    assert max(moved.values()) > 1e-2
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_skipped_layers_keep_their_weights(build):
    model = load_model(build(), nf4_skips=["down_proj", "model.layers.0.self_attn"], device="cpu")
    names = quantized_layers(model).keys()
    assert "model.layers.1.self_attn.q_proj" in names
    assert not [name for name in names if "down_proj" in name or "layers.0.self_attn" in name]


def test_nothing_but_packed_weights_waits_for_the_backward_pass(build, trajectories):
    kept = []
    model = in_4_bits(build())
    backend = adapted(model)
    largest = model.model.layers[0].mlp.up_proj.base_layer.weight
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        backend.forward_backward(batches_of(trajectories)[0], policy_gradient)
    assert kept and not [tensor for tensor in kept if tensor.shape in (largest.shape, largest.t().shape)]


def test_a_change_of_dtype_leaves_the_scales_alone(build):
    model = in_4_bits(build())
    before = {name: layer.weight for name, layer in quantized_layers(model).items()}
    model.to(torch.bfloat16)
    for name, layer in quantized_layers(model).items():
        assert torch.equal(layer.weight, before[name])


def test_a_number_that_is_not_finite_is_found_in_4_bits(build):
    broken = build()
    broken.model.layers[1].mlp.up_proj.weight.data[3, 2] = float("nan")
    with pytest.raises(ModelError):
        in_4_bits(broken)
    check_finite(in_4_bits(build()), "the model")


def test_gpt2_whose_layers_are_transposed_is_refused_in_4_bits(build, tmp_path):
    build("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ModelError):
        in_4_bits(tmp_path)


def test_missing_bitsandbytes_is_named(build, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ConfigError):
        in_4_bits(build())
