"""An adapter trains beside a frozen model; what is published and exported is the model that both make together."""

import json

import peft
import pytest
import torch
from packed import micro_batches as batches_of
from packed import policy_gradient
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl4llm.backends.heads import ValueHead
from rl4llm.backends.lora import FrozenModel, add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import CheckpointError, ConfigError, ModelError
from rl4llm.core.weights import TensorSpec

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2"]


def adapted(model, *, lr=0.02, dtype="float32", rank=4, value_head=None, checkpointing=False, **options):
    model = load_model(model, dtype=dtype, gradient_checkpointing=checkpointing)
    return TorchBackend(model, lr=lr, adapter=add_adapter(model, rank=rank, **options), value_head=value_head)


def train(backend, batches, steps=2):
    for _ in range(steps):
        for batch in batches:
            backend.forward_backward(batch, policy_gradient)
        metrics = backend.optim_step()
    return metrics


def logprobs(backend, batches):
    return torch.cat([backend.forward(batch)[batch.mask_BT] for batch in batches])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_merged_weights_equal_the_merge_of_peft(build, trajectories, tmp_path, architecture):
    plain = TorchBackend(load_model(build(architecture)), lr=1e-3).weight_specs()
    backend = adapted(build(architecture))
    assert type(backend.model) is type(build(architecture))
    train(backend, batches_of(trajectories))
    backend.write_adapter(tmp_path)
    whole = peft.PeftModel.from_pretrained(build(architecture), tmp_path).merge_and_unload().state_dict()
    found = dict(backend.weights())
    assert backend.weight_specs() == [TensorSpec.of(name, tensor) for name, tensor in found.items()] == plain
    before = build(architecture).state_dict()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, whole[name], atol=1e-6, rtol=0)
    assert any((tensor - before[name]).abs().max() > 1e-3 for name, tensor in found.items())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_exported_model_computes_what_the_adapted_one_does(build, trajectories, tmp_path, architecture):
    batches = batches_of(trajectories)
    backend = adapted(build(architecture))
    before = logprobs(backend, batches)
    train(backend, batches)
    found = logprobs(backend, batches)
    assert (found - before).abs().max() > 1e-2
    backend.export(tmp_path)
    exported = TorchBackend(load_model(tmp_path), lr=1e-3)
    torch.testing.assert_close(logprobs(exported, batches), found, atol=1e-5, rtol=0)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is type(backend.model)


def test_a_new_adapter_changes_nothing_and_alone_gets_gradients(build, trajectories):
    batches = batches_of(trajectories)
    plain, backend = TorchBackend(load_model(build()), lr=1e-3), adapted(build())
    assert torch.equal(logprobs(backend, batches), logprobs(plain, batches))
    assert backend.info()["batches as"] == plain.info()["batches as"]
    for batch in batches:
        backend.forward_backward(batch, policy_gradient)
    with_gradient = {
        name for name, parameter in backend.model.named_parameters() if parameter.grad is not None
    }
    assert with_gradient == {name for name, parameter in backend.model.named_parameters() if "lora_" in name}
    assert len(with_gradient) == 2 * 7 * 2
    frozen = {name: tensor.clone() for name, tensor in backend.adapter.base_parameters()}
    assert backend.optim_step()["grad_norm"] > 0
    for name, tensor in backend.adapter.base_parameters():
        assert torch.equal(tensor, frozen[name])


@pytest.mark.parametrize("layout", ["sorted", "packed", "shared"])
def test_the_adapters_gradient_equals_that_of_peft(build, trajectories, tmp_path, layout):
    backend = adapted(build(), dtype=torch.float64)
    train(backend, batches_of(trajectories), steps=1)  # B is not zero any more
    backend.write_adapter(tmp_path)
    for batch in batches_of(trajectories, layout, budget=40):
        backend.forward_backward(batch, policy_gradient)
    found = {
        name: parameter.grad
        for name, parameter in backend.model.named_parameters()
        if parameter.requires_grad
    }
    whole = peft.PeftModel.from_pretrained(
        build().double(), tmp_path, is_trainable=True, autocast_adapter_dtype=False
    )
    for batch in batches_of(trajectories, "sorted", budget=1000):
        output = whole(
            batch.token_ids_BT, attention_mask=(batch.segment_ids_BT > 0).long()
        ).logits.log_softmax(-1)
        numbers_BT = output[:, :-1].gather(-1, batch.token_ids_BT[:, 1:, None]).squeeze(-1)
        (-batch.credits_BT * batch.weights_BT * batch.mask_BT)[:, 1:].mul(numbers_BT).sum().backward()
    expected = {name: item.grad for name, item in whole.named_parameters() if item.requires_grad}
    assert {f"base_model.model.{name}" for name in found} == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[f"base_model.model.{name}"], atol=1e-7, rtol=1e-4)


def test_gradient_checkpointing_reaches_the_adapters(build, trajectories):
    grads = []
    for checkpointing in (False, True):
        backend = adapted(build(), checkpointing=checkpointing)
        for batch in batches_of(trajectories):
            backend.forward_backward(batch, policy_gradient)
        grads.append(
            {name: item.grad for name, item in backend.model.named_parameters() if item.requires_grad}
        )
    for name, gradient in grads[0].items():
        torch.testing.assert_close(gradient, grads[1][name])


def test_a_saved_run_resumes_bit_for_bit(build, trajectories, tmp_path):
    batches = batches_of(trajectories)
    backend = adapted(build(), seed=1)
    train(backend, batches)
    backend.save(tmp_path)
    saved = load_file(tmp_path / "weights.safetensors")
    assert all("lora_" in name for name in saved)
    assert backend.saved_bytes() == 3 * sum(tensor.nbytes for tensor in saved.values())  # with both moments
    other = adapted(build(), seed=2)
    other.load(tmp_path)
    for one in (backend, other):
        train(one, batches)
    for (name, tensor), (_, again) in zip(backend.weights(), other.weights(), strict=True):
        assert torch.equal(tensor, again), name


def test_a_checkpoint_of_another_base_or_kind_is_refused(build, trajectories, tmp_path):
    backend = adapted(build())
    train(backend, batches_of(trajectories))
    backend.save(tmp_path)
    moved = build()
    with torch.no_grad():
        moved.model.layers[1].mlp.up_proj.weight[3, 2] += 1e-3
    with pytest.raises(CheckpointError):
        adapted(moved).load(tmp_path)
    with pytest.raises(CheckpointError):
        adapted(build(), rank=2).load(tmp_path)
    with pytest.raises(CheckpointError):
        TorchBackend(load_model(build()), lr=1e-3).load(tmp_path)


def test_the_frozen_model_is_the_reference_of_its_policy(build, trajectories):
    batches = batches_of(trajectories)
    plain = TorchBackend(load_model(build()), lr=1e-3)
    backend, alone = adapted(build(), seed=1), adapted(build(), seed=1)
    reference = FrozenModel(backend, backend.adapter)
    for _ in range(2):
        train(backend, batches, steps=1)
        train(alone, batches, steps=1)
        assert torch.equal(logprobs(reference, batches), logprobs(plain, batches))
        assert torch.equal(logprobs(backend, batches), logprobs(alone, batches))
    assert (logprobs(backend, batches) - logprobs(plain, batches)).abs().max() > 1e-2
    assert {name for name, item in backend.model.named_parameters() if item.requires_grad} == {
        name for name, item in alone.model.named_parameters() if item.requires_grad
    }


def test_a_reference_that_fails_leaves_the_adapter_on(build, trajectories):
    batches = batches_of(trajectories)
    backend = adapted(build())
    train(backend, batches)
    before = logprobs(backend, batches)
    with pytest.raises(ZeroDivisionError), backend.adapter.off():
        _ = 1 / 0
    assert torch.equal(logprobs(backend, batches), before)


def test_the_adapter_comes_from_the_seed_alone(build):
    found = []
    for seed in (5, 5, 6):
        model = build()
        torch.manual_seed(len(found))
        state = torch.get_rng_state()
        found.append(dict(adapted(model, seed=seed).adapter.weights()))
        assert torch.equal(torch.get_rng_state(), state)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(found[0][name], found[1][name])
    assert not torch.equal(found[0][name], found[2][name])


def test_a_bf16_model_has_an_fp32_adapter_and_publishes_bf16(build, trajectories, tmp_path):
    backend = adapted(build(), dtype="bfloat16")
    train(backend, batches_of(trajectories))
    assert {tensor.dtype for _, tensor in backend.adapter.weights()} == {torch.float32}
    assert {tensor.dtype for _, tensor in backend.weights()} == {torch.bfloat16}
    assert backend.weight_specs() == [TensorSpec.of(name, tensor) for name, tensor in backend.weights()]
    backend.save(tmp_path)
    adapted(build(), dtype="bfloat16").load(tmp_path)


def test_a_value_head_trains_and_is_saved_with_the_adapter(build, trajectories, tmp_path):
    backend = adapted(build(), value_head=ValueHead(32))
    train(backend, batches_of(trajectories))
    backend.save(tmp_path)
    other = adapted(build(), value_head=ValueHead(32))
    other.load(tmp_path)
    assert other.value_head.linear.weight.abs().max() > 0
    assert torch.equal(other.value_head.linear.weight, backend.value_head.linear.weight)


def test_only_named_layers_are_adapted_and_listed_in_the_file(build, tmp_path):
    assert adapted(build()).adapter._options.lora_alpha == 8  # twice the rank
    backend = adapted(build(), targets=["v_proj", "q_proj"], alpha=3)
    backend.write_adapter(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["target_modules"], config["r"], config["lora_alpha"]) == (["q_proj", "v_proj"], 4, 3)
    assert {name.split(".")[-3] for name in load_file(tmp_path / "adapter_model.safetensors")} == {
        "q_proj",
        "v_proj",
    }


@pytest.mark.parametrize("name", ["router", "out_proj"])
def test_layers_that_peft_cannot_adapt_are_left_out(name, build, trajectories, tmp_path):
    kind = {"router": "phimoe", "out_proj": "falcon_h1"}[name]
    backend = adapted(build(kind))
    train(backend, batches_of(trajectories))
    assert backend.warnings()[-1:] == [f"The adapter leaves out {name}, which PEFT cannot adapt."]
    backend.write_adapter(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build(kind), tmp_path)
    assert {name for name in loaded.state_dict() if ".lora_" in name} == {
        name.replace(".weight", ".default.weight") for name, _ in backend.adapter.parameters()
    }


def test_what_cannot_be_adapted_is_refused(build):
    for targets in (["q_proj", "lm_head"], ["embed_tokens"]):
        with pytest.raises(ConfigError):
            adapted(build(), targets=targets)
    with pytest.raises(ModelError):
        add_adapter(adapted(build()).model, rank=4)
