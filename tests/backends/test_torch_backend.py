"""Every layout, micro-batch and form of the model gives the same loss and the same gradient."""

import copy
import json

import pytest
import torch
from packed import micro_batches as packed
from packed import pack, tries
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl4llm.backends import optimizer
from rl4llm.backends.heads import ValueHead
from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import CheckpointError
from rl4llm.core.types import TokenSpan, Trajectory
from rl4llm.data.layouts import LAYOUTS
from rl4llm.data.pack import totals_of

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2"]


def policy_gradient(batch, logprobs_BT, entropy_BT):
    ratio_BT = (logprobs_BT - batch.sampled_logprobs_BT).exp()
    losses_BT = -ratio_BT * batch.credits_BT
    if entropy_BT is not None:
        losses_BT = losses_BT - 0.3 * entropy_BT
    return losses_BT, {"ratio/mean": ratio_BT, "ratio/max": ratio_BT}


def backend_of(model, dtype="float32", **options):
    return TorchBackend(load_model(model, dtype=dtype), **{"lr": 1e-3, **options})


def gradients(backend, batches, **options):
    """Return (loss, gradient by name) of one optimizer step that is not taken."""
    loss = sum(backend.forward_backward(batch, policy_gradient, **options)["loss"] for batch in batches)
    found = {name: parameter.grad.clone() for name, parameter in backend.model.named_parameters()}
    backend.model.zero_grad()
    return loss, found


def naive_gradients(model, trajectories, temperature=1.0, entropy=False):
    """Run each trajectory alone through the plain model, with all its logits and its loss spelled out."""
    total = 0.0
    for number, trajectory in enumerate(trajectories):
        ids = torch.tensor([trajectory.token_ids])
        logp_TV = (model(input_ids=ids, use_cache=False).logits[0].double() / temperature).log_softmax(-1)
        position = 0
        for span in trajectory.spans:
            for offset, token in enumerate(span.token_ids):
                if span.author == "policy":
                    logp_V = logp_TV[position - 1]
                    loss = -(logp_V[token] - span.logprobs[offset]).exp() * (1.0 - 0.3 * number)
                    if entropy:
                        loss = loss + 0.3 * (logp_V.exp() * logp_V).sum()
                    total = total + loss / (trajectory.num_policy_tokens * len(trajectories))
                position += 1
    total.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return total.item(), found


def assert_same(one, other, tolerance=1e-6):
    loss, grads = one
    assert loss == pytest.approx(other[0], abs=tolerance)
    assert grads.keys() == other[1].keys()
    scale = max(grad.abs().max() for grad in other[1].values())
    for name, grad in grads.items():
        difference = (grad - other[1][name]).abs().max()
        assert difference <= tolerance * max(1.0, scale), f"{name}: {difference}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_layout_gives_the_plain_models_loss_and_gradient(build, trajectories, architecture):
    model = load_model(build(architecture), dtype=torch.float64)  # so that rounding does not hide a mistake
    expected = naive_gradients(model, trajectories)
    backend = TorchBackend(model, lr=1e-3)
    for layout in ("sorted", "packed", "shared"):
        assert_same(gradients(backend, packed(trajectories, layout)), expected)


@pytest.mark.parametrize("shortest", [1, 3])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen3_5", "falcon_h1"])
def test_sharing_any_prefix_keeps_the_plain_models_gradient(build, monkeypatch, architecture, shortest):
    monkeypatch.setattr("rl4llm.data.layouts.SHORTEST", shortest)
    recurrent = architecture in ("qwen3_5", "falcon_h1")  # their kernels compute in float32
    model = load_model(build(architecture), dtype=torch.float32 if recurrent else torch.float64)
    backend = TorchBackend(model, lr=1e-3)
    assert (backend.layout("shared") == "shared") == (architecture not in ("gemma2", "falcon_h1"))
    for seed in (0, 1):
        expected = naive_gradients(model, tries(seed))
        for budget in (1000, 45):
            found = gradients(backend, packed(tries(seed), "shared", budget))
            assert_same(found, expected, 2e-5 if recurrent else 1e-6)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_llama_family_runs_as_one_row_without_padding(build, architecture):
    assert backend_of(build(architecture)).info()["batches as"] == "one row without padding"


def test_a_model_that_caps_attention_scores_uses_padded_rows(build):
    backend = backend_of(build("gemma2"))
    assert backend.info()["batches as"] == "padded rows"
    assert {backend.layout(layout) for layout in LAYOUTS} == {"sorted"}


def test_a_model_that_scales_its_logits_computes_them_itself(build, trajectories):
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, logit_scale=7.0, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model = load_model(CohereForCausalLM(config), dtype=torch.float64)
    expected = naive_gradients(model, trajectories, temperature=0.9, entropy=True)
    found = gradients(TorchBackend(model, lr=1e-3), packed(trajectories), temperature=0.9, entropy=True)
    assert_same(found, expected)


def test_recurrent_layers_share_prompts_in_every_layout(build, trajectories):
    for length in (8, 7):  # prompts so similar that they are padded to one block
        for new in (3, 4):
            spans = (
                TokenSpan.context(tuple(range(2, 2 + length))),
                TokenSpan(tuple(range(20, 20 + new)), "policy", (-1.0,) * new, 0),
            )
            trajectories.append(Trajectory(f"q{length}", spans, (), {}, 0.0, "stop"))
    expected = naive_gradients(build("qwen3_5"), trajectories)
    for options in ({}, {"gradient_checkpointing": True}):
        backend = TorchBackend(load_model(build("qwen3_5"), **options), lr=1e-3)
        assert backend.info()["batches as"] == "one row without padding"
        for layout in ("sorted", "packed", "shared"):
            for budget in (64, 1000):
                assert_same(gradients(backend, packed(trajectories, layout, budget)), expected, 2e-5)


def test_micro_batch_size_and_order_do_not_change_the_gradient(build, trajectories):
    backend = backend_of(build())
    expected = gradients(backend, packed(trajectories, budget=1000))
    for layout in ("sorted", "packed", "shared"):
        batches = packed(trajectories, layout, budget=40)
        assert len(batches) > 3
        assert_same(gradients(backend, batches), expected)
        assert_same(gradients(backend, batches[::-1]), expected)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_omitting_rows_without_credit_keeps_the_gradient(build, trajectories, aggregation):
    credits = [0.0 if number % 3 else 1.0 for number in range(len(trajectories))]
    options = {
        "max_tokens_per_batch": 64, "layout": "shared", "aggregation": aggregation,
        "totals": totals_of(trajectories), "pad_token_id": 0,
    }  # fmt: skip
    backend = backend_of(build())
    expected = gradients(backend, pack(trajectories, credits, **options))
    taught = [number for number, credit in enumerate(credits) if credit]
    few = pack([trajectories[i] for i in taught], [credits[i] for i in taught], **options)
    assert_same(gradients(backend, few), expected)


def test_temperature_and_entropy_have_the_plain_models_gradient(build, trajectories):
    model = load_model(build(), dtype=torch.float64)
    expected = naive_gradients(model, trajectories, temperature=0.7, entropy=True)
    found = gradients(TorchBackend(model, lr=1e-3), packed(trajectories), temperature=0.7, entropy=True)
    assert_same(found, expected)


def test_gradient_checkpointing_does_not_change_the_gradient(build, trajectories):
    expected = gradients(backend_of(build()), packed(trajectories))
    backend = TorchBackend(load_model(build(), gradient_checkpointing=True), lr=1e-3)
    assert backend.info()["gradient_checkpointing"]
    assert_same(gradients(backend, packed(trajectories)), expected)


def test_log_probs_equal_a_plain_log_softmax(build, trajectories):
    model = load_model(build())
    backend = backend_of(model)
    for layout in ("sorted", "packed", "shared"):
        for batch in packed(trajectories, layout):
            logprobs_BT = backend.forward(batch, temperature=1.3)
            assert (logprobs_BT[~batch.mask_BT] == 0).all()
            assert not logprobs_BT.requires_grad
    batch = packed(trajectories, "sorted", budget=1000)[0]
    with torch.no_grad():
        logits_BTV = (
            model(input_ids=batch.token_ids_BT, attention_mask=(batch.segment_ids_BT > 0).long()).logits / 1.3
        )
    expected_BT = logits_BTV[:, :-1].log_softmax(-1).gather(2, batch.token_ids_BT[:, 1:, None])[..., 0]
    torch.testing.assert_close(
        backend.forward(batch, temperature=1.3)[:, 1:], expected_BT * batch.mask_BT[:, 1:], atol=2e-6, rtol=0
    )


def test_metrics_are_means_or_maxima_over_policy_tokens(build, trajectories):
    backend = backend_of(build())
    batch = packed(trajectories, "sorted", budget=1000)[0]
    ratio_BT = (backend.forward(batch) - batch.sampled_logprobs_BT).exp()[batch.mask_BT]
    metrics = backend.forward_backward(batch, policy_gradient)
    assert metrics["tokens"] == int(batch.mask_BT.sum())
    assert metrics["ratio/mean"] == pytest.approx(ratio_BT.mean().item(), rel=1e-5)
    assert metrics["ratio/max"] == pytest.approx(ratio_BT.max().item(), rel=1e-5)


def test_measures_add_metrics_and_leave_the_gradient_alone(build, trajectories):
    def twice(batch, logprobs_BT, metrics):
        return {"twice/max": 2 * metrics["ratio/max"], "logprob": logprobs_BT}

    batch = packed(trajectories, "sorted", budget=1000)[0]
    plain, measured = backend_of(build()), backend_of(build())
    expected = plain.forward_backward(batch, policy_gradient)
    metrics = measured.forward_backward(batch, policy_gradient, measures=twice)
    logprobs_BT = plain.forward(batch)[batch.mask_BT]
    assert metrics.pop("twice/max") == 2 * expected["ratio/max"]
    assert metrics.pop("logprob") == pytest.approx(logprobs_BT.mean().item(), rel=1e-5)
    assert metrics == expected
    for one, other in zip(plain.model.parameters(), measured.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_bf16_autocast_comes_close_and_keeps_fp32_gradients(build, trajectories):
    _, expected = gradients(backend_of(build()), packed(trajectories))
    _, grads = gradients(backend_of(build(), autocast="bfloat16"), packed(trajectories))
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    one, other = (torch.cat([grad.flatten() for grad in found.values()]) for found in (grads, expected))
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.99


def in_bf16(model, **options):
    return TorchBackend(load_model(model, dtype="bfloat16"), **options)


def masters(backend):
    return {name: tensor.detach().clone() for name, tensor in backend._optimizer.masters.items()}


def imitation(batch, logprobs_BT, entropy_BT):
    return -logprobs_BT, {}


def learned(backend, batches, optimizer=None, steps=28):
    """Take small steps; return the fall of the loss with exact and with published weights, and how the exact ones moved."""
    published = dict(backend.model.named_parameters())
    exact = published | ({} if optimizer else backend._optimizer.masters)
    start = {name: tensor.detach().clone() for name, tensor in exact.items()}
    for _ in range(steps):
        for batch in batches:
            backend.forward_backward(batch, imitation)
        backend.optim_step() if optimizer is None else (optimizer.step(), optimizer.zero_grad())
    moved = torch.cat([(tensor.detach() - start[name]).float().flatten() for name, tensor in exact.items()])
    before = loss_in_fp32(backend.model, start, batches)
    return [before - loss_in_fp32(backend.model, named, batches) for named in (exact, published)], moved


def loss_in_fp32(model, named, batches):
    measured = TorchBackend(load_model(copy.deepcopy(model), dtype="float32"), trains=False)
    measured.take_weights(iter(named.items()))
    return sum(measured.forward_backward(batch, imitation)["loss"] for batch in batches)


def test_bf16_learns_as_fp32_where_plain_adamw_stands_still(build, trajectories):
    batches = packed(trajectories)
    half, plain = (in_bf16(build(), lr=1e-5) for _ in range(2))
    adam = torch.optim.AdamW(plain.model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0)
    (expected, _), moved = learned(backend_of(build(), lr=1e-5), batches)
    assert expected > 0.05
    (exact, published), same = learned(half, batches)
    assert exact == pytest.approx(expected, rel=0.01)
    assert published > 0.8 * expected  # what is less than half of a bf16 number is not seen yet
    assert torch.nn.functional.cosine_similarity(same, moved, dim=0) > 0.99
    (lost, _), still = learned(plain, batches, adam)
    assert lost < 0.1 * expected
    assert torch.nn.functional.cosine_similarity(still, moved, dim=0) < 0.3


def test_bf16_publishes_and_exports_rounded_masters(build, trajectories, tmp_path):
    backend = in_bf16(build(), lr=1e-5)
    train(backend, packed(trajectories), 3)
    backend.export(tmp_path)
    exported = load_file(tmp_path / "model.safetensors")
    for name, tensor in backend.weights():
        master = backend._optimizer.masters[name]
        assert torch.equal(tensor, master.bfloat16()) and not torch.equal(tensor.float(), master)
        assert torch.equal(exported[name], tensor) and exported[name].dtype == torch.bfloat16

    backend.save(tmp_path)
    sizes = {
        file.stem: sum(tensor.nbytes for tensor in load_file(file).values())
        for file in tmp_path.glob("*.safetensors")
    }
    assert backend.exported_bytes() == sizes.pop("model") and backend.saved_bytes() == sum(sizes.values())


def test_weights_that_are_taken_become_the_masters(build, trajectories):
    backend, other = in_bf16(build(), lr=1e-5), in_bf16(build(), lr=1e-3)
    for one in (backend, other):
        train(one, packed(trajectories), 2)
    backend.take_weights(other.own_weights())
    for name, tensor in other.weights():
        assert torch.equal(backend._optimizer.masters[name], tensor.float())


def test_a_bf16_checkpoint_without_masters_is_loaded(build, trajectories, tmp_path):
    backend, loaded = in_bf16(build(), lr=1e-3), in_bf16(build(), lr=1e-3)
    train(backend, packed(trajectories), 2)
    backend.save(tmp_path)
    for name in ("weights.safetensors", "optimizer.safetensors"):  # as they were before there were masters
        tensors = {key: tensor.bfloat16() for key, tensor in load_file(tmp_path / name).items()}
        save_file(tensors, tmp_path / name)
    loaded.load(tmp_path)
    for name, tensor in backend.weights():
        assert torch.equal(loaded._optimizer.masters[name], tensor.float())
    train(loaded, packed(trajectories), 1)
    assert {tensor.dtype for tensor in loaded._optimizer.state()[0].values()} == {torch.float32}


def train(backend, batches, steps):
    for _ in range(steps):
        for batch in batches:
            backend.forward_backward(batch, policy_gradient)
        backend.optim_step()


@pytest.mark.parametrize("kind", [backend_of, in_bf16])
def test_two_steps_resume_and_two_more_equal_four_bit_for_bit(build, trajectories, tmp_path, kind):
    batches = packed(trajectories)
    options = {"schedule": "cosine", "total_steps": 10, "warmup_steps": 1, "weight_decay": 0.1, "lr": 1e-4}
    whole, first, second = (kind(build(), **options) for _ in range(3))
    train(whole, batches, 4)
    train(first, batches, 2)
    first.save(tmp_path)
    second.load(tmp_path)
    train(second, batches, 2)
    for (name, one), (_, other) in zip(whole.weights(), second.weights(), strict=True):
        assert torch.equal(one, other), name
    assert all(torch.equal(one, masters(second)[name]) for name, one in masters(whole).items())


def test_loading_writes_into_the_tensors_that_an_engine_shares(build, trajectories, tmp_path):
    backend = backend_of(build())
    layers = _qkv(backend.model)
    fused = torch.cat([layer.weight.detach() for layer in layers])
    for part, layer in zip(fused.split([layer.out_features for layer in layers]), layers, strict=True):
        layer.weight.data = part
    backend.save(tmp_path)
    saved = fused.clone()
    train(backend, packed(trajectories), 1)
    assert not torch.equal(fused, saved)  # the optimizer's step went into the shared storage too
    backend.load(tmp_path)
    assert torch.equal(fused, saved)


def _qkv(model):
    attention = model.model.layers[0].self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def test_another_models_checkpoint_is_refused_without_a_change(build, tmp_path):
    backend_of(build("llama")).save(tmp_path)
    backend = backend_of(build("qwen3"))
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    with pytest.raises(CheckpointError):
        backend.load(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.weights())


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "backend.json"])
def test_a_damaged_or_missing_file_of_a_checkpoint_is_an_error(build, trajectories, tmp_path, name):
    backend = backend_of(build())
    train(backend, packed(trajectories), 1)
    backend.save(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:40])
    with pytest.raises(CheckpointError):
        backend.load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError):
        backend.load(tmp_path)


def test_missing_moments_are_an_error_not_a_fresh_start(build, trajectories, tmp_path):
    backend = backend_of(build())
    train(backend, packed(trajectories), 1)
    backend.save(tmp_path)
    moments = load_file(tmp_path / "optimizer.safetensors")
    moments.pop("model.norm.weight.exp_avg")
    save_file(moments, tmp_path / "optimizer.safetensors")
    with pytest.raises(CheckpointError):
        backend.load(tmp_path)


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_an_exported_directory_holds_the_same_model(build, trajectories, tmp_path, architecture):
    backend = backend_of(build(architecture))
    train(backend, packed(trajectories), 1)
    backend.export(tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 9, 13]])
    with torch.no_grad():
        torch.testing.assert_close(exported(ids).logits, backend.model(ids).logits, atol=1e-6, rtol=0)
    assert "rl4llm" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_weights_have_hugging_face_names_and_tied_ones_come_once(build):
    names = [name for name, _ in backend_of(build("qwen2")).weights()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(set(names))
    assert not any(tensor.requires_grad for _, tensor in backend_of(build("llama")).weights())


def test_a_gradient_that_is_not_finite_skips_the_step(build, trajectories):
    backend = backend_of(build())
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    for batch in packed(trajectories):
        backend.forward_backward(batch, policy_gradient)
    next(iter(backend.model.parameters())).grad[0, 0] = float("nan")
    assert backend.optim_step()["skipped"] == 1.0
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.weights())
    train(backend, packed(trajectories), 1)  # the broken gradient is gone
    assert all(tensor.isfinite().all() for _, tensor in backend.weights())
    assert any(not torch.equal(before[name], tensor) for name, tensor in backend.weights())


def test_bf16_weights_add_up_micro_batches_in_fp32(build, trajectories):
    """In bf16 a sum of equal numbers is off by more than this after a few of them."""
    backend, batch = backend_of(build(), dtype="bfloat16"), packed(trajectories)[0]
    backend.forward_backward(batch, policy_gradient)
    once = {name: item.grad.clone() for name, item in backend.stepped.items()}
    for _ in range(29):
        backend.forward_backward(batch, policy_gradient)
    for name, item in backend.stepped.items():
        torch.testing.assert_close(item.grad, 30 * once[name], rtol=1e-4, atol=0)
    assert all(parameter.grad is None for parameter in backend.model.parameters())


def test_a_critic_is_a_backend_with_a_value_head(build, trajectories):
    torch.manual_seed(0)
    head = ValueHead(32)
    torch.nn.init.normal_(head.linear.weight)
    critic = TorchBackend(load_model(build()), lr=1e-2, value_head=head)
    shared, rows = (packed(trajectories, layout, budget=1000)[0] for layout in ("shared", "sorted"))
    assert critic.forward(shared)[shared.mask_BT].sort()[0] == pytest.approx(
        critic.forward(rows)[rows.mask_BT].sort()[0].tolist(), abs=1e-5
    )

    def squared_error(batch, values_BT, _):
        return (values_BT - 1.0).square() * batch.mask_BT, {}

    losses = []
    for _ in range(20):
        losses.append(critic.forward_backward(shared, squared_error)["loss"])
        critic.optim_step()
    assert losses[-1] < losses[0] / 2


def test_the_state_before_a_token_does_not_know_the_token(build, trajectories):
    batch = packed(trajectories, "sorted", budget=1000)[0]
    critic = TorchBackend(load_model(build()), lr=0.0, value_head=ValueHead(32))
    torch.nn.init.normal_(critic.value_head.linear.weight)
    row, column = (int(x[-1]) for x in batch.mask_BT.nonzero(as_tuple=True))
    before = critic.forward(batch)[row, column].item()
    batch.token_ids_BT[row, column] += 1
    assert critic.forward(batch)[row, column].item() == before


def test_a_batch_that_asks_nothing_of_the_model_has_no_gradient(build, trajectories):
    batch = packed(trajectories)[0]
    batch.mask_BT = torch.zeros_like(batch.mask_BT)
    backend = backend_of(build())
    assert backend.forward_backward(batch, policy_gradient)["tokens"] == 0
    assert not backend.forward(batch).any()
    assert all(parameter.grad is None for parameter in backend.model.parameters())


def test_everything_leaves_the_device_and_comes_back(build, trajectories, monkeypatch):
    """Moves are copies here, since this machine has one device; `scripts/bench/gpu.py memory` moves for real."""
    stays, leaves = (backend_of(build("qwen2"), "bfloat16") for _ in range(2))
    batches, moved = packed(trajectories), []

    def copied(tensor, device):
        moved.append((tensor.data_ptr(), device.type))
        return tensor.clone()

    def step(backend):
        for batch in batches:
            backend.forward_backward(batch, policy_gradient)
        backend.optim_step()

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(optimizer, "_moved", copied)
    for backend in (stays, leaves):
        step(backend)
    held = [*leaves.model.parameters(), *leaves.model.buffers(), *leaves._optimizer.masters.values()]
    held += [tensor for state in leaves._optimizer.adam.state.values() for tensor in state.values()]
    expected = {(tensor.data_ptr(), "cpu") for tensor in held}
    leaves.device = torch.device("cuda")
    leaves.offload()
    assert set(moved) >= expected and len(expected) > 40
    leaves.onload()
    away, back = moved[: len(moved) // 2], moved[len(moved) // 2 :]
    assert {device for _, device in away} == {"cpu"} and {device for _, device in back} == {"cuda"}
    leaves.device = torch.device("cpu")
    step(stays)
    step(leaves)
    for (name, one), other in zip(stays.weights(), dict(leaves.weights()).values(), strict=True):
        assert one.equal(other), name
