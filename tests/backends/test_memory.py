"""What backends say they take is what torch makes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl4llm.backends.heads import GPU_TILE_BYTES, KEEP_BYTES, TILE_BYTES, head_memory
from rl4llm.backends.lora import add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.runner import TokenNumbers
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.compose.models import BACKENDS
from rl4llm.core.model_memory import INT8, Precision
from rl4llm.core.types import TrainBatch
from rl4llm.extensions.inspect.plan.shape import shape_of
from rl4llm.runtime.quantized import quantized_layers
from rl4llm.runtime.ranks import Ranks

FLOAT32, BFLOAT16 = Precision.of("float32"), Precision.of("bfloat16")


@pytest.fixture
def llama(tmp_path):
    """Return the directory of a model of three layers."""
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return str(tmp_path)


def saved_bytes(module):
    """Return the bytes that autograd keeps of 8 rows of 64 tokens, beside the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved, alive = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    zeros = torch.zeros(8, 65)
    mask = zeros.bool()
    mask[:, -1] = True  # one token is asked for: the head keeps next to nothing
    batch = TrainBatch(
        token_ids_BT=torch.ones(8, 65, dtype=torch.long),
        position_ids_BT=torch.arange(65).expand(8, 65),
        segment_ids_BT=torch.ones(8, 65, dtype=torch.long),
        mask_BT=mask,
        sampled_logprobs_BT=zeros,
        credits_BT=zeros,
        weights_BT=zeros,
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(batch, 1.0, False)
    return sum(saved.values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_autograd_saves(llama, checkpointing):
    module = TokenNumbers(load_model(llama, gradient_checkpointing=checkpointing), None, None, Ranks())
    shape, tokens = shape_of(module.model), 8 * 64
    planned = shape.activations(FLOAT32, tokens, tokens, checkpointing=checkpointing)
    planned -= tokens * shape.hidden * 4  # what the last norm gives is there, but not for the backward pass
    if checkpointing:  # the layer that is computed again is not there yet
        planned -= shape.layer_activations(FLOAT32, tokens, tokens)
    assert saved_bytes(module) == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "autocast"), [("float32", "none"), ("float32", "bfloat16"), ("bfloat16", "none")]
)
def test_an_adapter_keeps_the_inputs_that_it_casts(llama, dtype, autocast, monkeypatch):
    monkeypatch.setattr("rl4llm.backends.attention.EAGER_SCORES", 0)  # keeps no scores, like a GPU
    model = load_model(llama, dtype=dtype)
    shape, tokens = shape_of(model, lora_rank=4), 8 * 64
    add_adapter(model, rank=4)
    module = TokenNumbers(model, None, torch.bfloat16 if autocast == "bfloat16" else None, Ranks())
    precision = Precision.of(dtype, autocast)
    planned = shape.layers * shape.layer_activations(precision, tokens, tokens)
    if precision.autocast:  # copies of the frozen weights, which the gradient passes through
        planned += 2 * (shape.linear - shape.vocabulary * shape.hidden)
    assert saved_bytes(module) == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_checkpoint_is_as_large_as_a_backend_says(model, tmp_path, rank, dtype):
    model, shape = model.to(getattr(torch, dtype)), shape_of(model, lora_rank=rank)
    planned = TorchBackend.memory(shape, Precision.of(dtype), {})
    adapter = add_adapter(model, rank=rank) if rank else None
    backend = TorchBackend(model, adapter=adapter)
    for parameter in backend.stepped.values():
        parameter.grad = torch.ones_like(parameter)
    backend.optim_step()
    backend.save(tmp_path)
    written = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert planned.saved <= written <= planned.saved + 20_000  # and two headers
    optimizer = backend._optimizer
    held = [*optimizer.masters.values(), *optimizer.state()[0].values()]
    assert sum(tensor.nbytes for tensor in model.parameters()) == planned.weights
    assert sum(tensor.nbytes for tensor in held) == planned.optimizer


def test_a_base_in_4_bits_and_8_bit_moments_take_what_is_planned(llama):
    pytest.importorskip(
        "bitsandbytes", reason="bitsandbytes is not installed: pip install 'rl4llm[bitsandbytes]'"
    )
    model = load_model(llama, nf4_skips=["down_proj"], device="cpu")
    backend = TorchBackend(model, adapter=add_adapter(model, rank=128), lr=1e-3, optimizer="adamw8bit")
    shape = shape_of(load_model(llama), lora_rank=128, nf4_skips=["down_proj"])
    planned = TorchBackend.memory(shape, Precision(moments=INT8), {})
    layers = quantized_layers(model).values()
    assert shape.packed == sum(layer.in_features * layer.out_features for layer in layers)
    scales = sum(layer.state.absmax.nbytes + layer.state.state2.absmax.nbytes for layer in layers)
    weights = (
        sum(item.nbytes for item in model.parameters())
        + sum(layer.packed.nbytes for layer in layers)
        + scales
    )
    assert weights == pytest.approx(planned.weights, rel=1e-3)
    for parameter in backend.stepped.values():
        parameter.grad = torch.ones_like(parameter)
    backend.optim_step()
    moments = backend.optimizer.state()[0].values()
    assert sum(item.nbytes for item in moments) == pytest.approx(planned.optimizer, rel=1e-3)


def test_ranks_share_what_their_zero_stage_says(model):
    """Rajbhandari et al. 2020, figure 1: bf16 takes 2 + 2 + 12 bytes of a number; here gradients are summed in fp32."""
    shape, ranks = shape_of(model), 4
    numbers = shape.parameters
    expected = {1: (2, 4, 12 / 4), 2: (2, 4 / 4, 12 / 4), 3: (2 / 4, 4 / 4, 12 / 4)}
    for stage, (weights, gradients, optimizer) in expected.items():
        for options in ({"zero_stage": stage}, {"config": {"zero_optimization": {"stage": stage}}}):
            found = BACKENDS["deepspeed"].memory(shape, BFLOAT16, options, ranks)
            assert found.weights == pytest.approx(weights * numbers, abs=ranks)
            assert found.gradients == pytest.approx(gradients * numbers, abs=ranks)
            assert found.optimizer == pytest.approx(optimizer * numbers, abs=ranks)
            assert found.saved == 12 * numbers  # the master and both moments
    offloaded = BACKENDS["deepspeed"].memory(
        shape, BFLOAT16, {"zero_stage": 2, "offload_optimizer": True}, ranks
    )
    assert offloaded.optimizer == 0


def test_ranks_share_everything_under_fsdp2(model):
    shape, ranks = shape_of(model), 4
    numbers = shape.parameters
    plain = TorchBackend.memory(shape, FLOAT32, {}, ranks)
    assert (plain.weights, plain.buckets, plain.optimizer) == (4 * numbers, 4 * numbers, 8 * numbers)
    assert plain.gradients == 0  # they are views of the buckets
    sharded = TorchBackend.memory(shape, FLOAT32, {"shard": "fsdp2"}, ranks)
    assert sharded.weights + sharded.gradients + sharded.optimizer == pytest.approx(16 * numbers / 4, abs=12)
    assert sharded.gathered > 0 and plain.gathered == 0 and sharded.buckets == 0
    frozen = TorchBackend.memory(shape, FLOAT32, {"shard": "fsdp2"}, ranks, trains=False)
    assert frozen.weights == sharded.weights and frozen.gradients == frozen.optimizer == 0


def test_a_head_needs_no_more_than_its_tiles(model):
    shape = shape_of(model)
    few, many = (head_memory(shape, FLOAT32, asked, backward=True) for asked in (10**6, 2 * 10**6))
    assert many - few == 10**6 * shape.hidden * 12  # hidden states, their copy and their gradient
    assert few > 3 * TILE_BYTES + KEEP_BYTES
    gpu = head_memory(shape, Precision.of("float32", gpu=True), 10**6, backward=True)
    assert gpu - few == 3 * (GPU_TILE_BYTES - TILE_BYTES) - KEEP_BYTES
